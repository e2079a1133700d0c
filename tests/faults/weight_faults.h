#pragma once

#include <functional>
#include <set>
#include <string>

#include "layers/ffn_spec.h"
#include "tests/faults/fault.h"
#include "tests/faults/hooked_source.h"

namespace gatefold {

/// Faults of loading, one a name:
///   shards_swapped     ranks 0 and 1 read each other's gate and up, but their own down
///   shards_exchanged   they read each other's down, too. Nothing is wrong with y then: on 2 or 4
///                      ranks their roots meet in one node, and a + b = b + a to the bit
///   shard_0_everywhere every rank reads the columns of rank 0
///   gate_up_swapped    gate is read for up, and up for gate
///   low_bit            at a point (up, gate, down, up_bias, down_bias), one rank: the smallest
///   weight
///                      of its first piece has its lowest bit flipped, which y is too coarse to
///                      show
///   bias_per_rank      down's bias comes out once for each rank of the group
using MakeRead = std::function<HookedSource::Read(const FfnSpec& spec, Range columns, int rank)>;

/// Empty where the fault isn't one of these. columns: the rank's own of the width I.
MakeRead weight_fault(const Fault& fault);

/// The smallest weight of the first piece that is read of one of these tensors has its lowest bit
/// flipped. For 16-bit elements: without their sign they are in order as integers.
HookedSource::Read flip_low_bit(std::set<std::string> tensors);

}  // namespace gatefold
