#pragma once

#include "launch/job.h"
#include "tests/faults/fault.h"
#include "tests/faults/hooked_source.h"

namespace gatefold {

/// Faults of a mixture of experts, one a name:
///   expert_off_by_one  one rank computes expert e + 1 where it should compute e
///   shared_per_rank    each rank adds the shared expert to a token's sum
///   scaling_twice      routing weights are scaled twice
///   less_capacity      experts take one row less than they should
///   drops_otherwise    experts drop by another rule than they should
///   biased_weights     the correction bias weighs, though it should only choose
///   stale_bias         a new correction bias isn't heeded: experts are chosen with the first one
///   reversed_bias      what a new correction bias adds to the first one, it takes away
///   ties_to_highest    of equal experts the highest is chosen, not the lowest
///   halves_swapped     at a point (dispatch, combine): of the rows that come to one rank from
///                      another, the first half takes the place of the second
/// Empty seams where the fault isn't one of these.
Seams expert_seams(const Fault& fault);

/// low_bit at a point (experts, router), on one rank; see weight_fault().
HookedSource::Read expert_low_bit(const Fault& fault, const MoeSpec& spec, int rank);

/// Whether exchange number `call` of a layer, from 1 on, is at the fault's point: dispatch is the
/// first and combine the second of a mixture of experts, and no point or another is any of them.
bool is_at(const Fault& fault, int call);

}  // namespace gatefold
