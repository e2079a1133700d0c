#include "layers/kernel_choice.h"

#include <fmt/format.h>

#include <algorithm>

#include "parallel/agreement.h"
#include "runtime/hash.h"

namespace gatefold {
namespace {

/// What rank 0's library chooses, on every rank: by themselves two may choose differently, where
/// the load of their GPUs or their settings differ. Collective.
std::vector<std::byte> gemms_of_rank_0(Communicator& comm, Device& device, DType storage,
                                       const std::vector<WeightShape>& shapes) {
  std::vector<std::byte> choices;
  run_agreed(comm, [&] {
    if (comm.rank() == 0) choices = device.choose_gemms(shapes, storage);
  });
  auto bytes = static_cast<std::int64_t>(choices.size());
  comm.host().broadcast(reinterpret_cast<std::byte*>(&bytes), sizeof(bytes), 0);
  choices.resize(static_cast<std::size_t>(bytes));
  comm.host().broadcast(choices.data(), bytes, 0);
  return choices;
}

}  // namespace

KernelChoice choose_kernel(Communicator& comm, Device& device, DType dtype,
                           const std::vector<WeightShape>& shapes, bool trust_library) {
  require_equal(comm, "the GEMM library", device.library());
  const DType storage = device.storage(dtype);
  const std::vector<std::byte> choices = gemms_of_rank_0(comm, device, storage, shapes);
  bool there = true;
  bool rows = trust_library;
  bool columns = true;
  Fnv1a fingerprint;
  std::string name;
  run_agreed(comm, [&] {
    device.pin_gemms(shapes, storage, choices);
    for (const WeightShape& shape : shapes) {
      const SelfCheck check = device.self_check(shape, storage);
      comm.progress().tick();
      there = there && !check.kernel.empty();
      rows = rows && check.rows;
      columns = columns && check.columns;
      fingerprint.add_number(check.fingerprint);
      name = check.kernel;
    }
  });
  if (!all_true(comm, rows)) {
    const char* why = all_true(comm, there) ? "the library's tiles failed the self-check"
                                            : "the library has no GEMM that runs on every rank";
    return {GemmKernel::kPlain, fmt::format("plain {} kernel ({})", name_of(storage), why)};
  }
  const bool any_width = all_true(comm, columns);
  require_equal(comm, "self-check results",
                fmt::format("{:016x} by {}", fingerprint.value(), name));
  if (any_width) return {GemmKernel::kLibraryTiles, name};
  return {GemmKernel::kLibraryPanels, name + ", panels of one width"};
}

std::vector<WeightShape> ffn_shapes(const FfnSpec& spec, std::int64_t blocks) {
  const Blocks cut{spec.intermediate_size, blocks};
  std::vector<WeightShape> shapes;
  const auto add = [&shapes](const WeightShape& shape) {
    if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
  };
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t width = cut.columns(b).size();
    if (width == 0) continue;
    add({width, spec.hidden_size, spec.gated()});
    add({spec.hidden_size, width, false});
  }
  return shapes;
}

}  // namespace gatefold
