#pragma once

#include <string>
#include <vector>

#include "layers/ffn_spec.h"
#include "parallel/communicator.h"
#include "runtime/device.h"

namespace gatefold {

struct KernelChoice {
  GemmKernel kernel = GemmKernel::kPlain;
  std::string name;  // for the report's header
};

/// Lets the devices of all ranks of `comm` run `shapes` as rank 0's library would, runs the
/// start-up self-check and says which kernel all use: the library's tiles, or our plain one where
/// the check failed on any rank, or rank 0's choice can't run there. Collective. `trust_library`
/// false on any rank stands for a failed check there. Throws Error 64 where ranks have different
/// libraries or get different bits.
KernelChoice choose_kernel(Communicator& comm, Device& device, DType dtype,
                           const std::vector<WeightShape>& shapes, bool trust_library = true);

/// The distinct block shapes of a dense FFN, over all ranks: what its kernel is chosen for.
std::vector<WeightShape> ffn_shapes(const FfnSpec& spec, std::int64_t blocks);

}  // namespace gatefold
