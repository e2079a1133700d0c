#include "launch/version.h"

#include <fmt/format.h>

#include <utility>

#include "parallel/versions.h"
#include "runtime/device.h"
#include "runtime/versions.h"

namespace gatefold {

std::string parts_text() {
  std::string text;
  const std::pair<const char*, std::string> parts[] = {{"MPI", mpi_version()},
                                                       {"oneDNN", onednn_version()},
                                                       {"CUDA", cuda_version()},
                                                       {"NCCL", nccl_version()}};
  for (const auto& [name, version] : parts) {
    text += fmt::format("{:<8}{}\n", name, version.empty() ? "not built in" : version);
  }
  const std::string found = cuda_found();
  return text + fmt::format("{:<8}{}\n", "found",
                            found.empty()
                                ? "no CUDA device (" + visible_cuda_devices().why_none + ")"
                                : found);
}

}  // namespace gatefold
