#include "runtime/error.h"
#include "runtime/onednn_gemm.h"
#include "runtime/versions.h"

namespace gatefold {

struct OnednnGemm::State {};

OnednnGemm::OnednnGemm(std::unique_ptr<State> state) : state_(std::move(state)) {}
OnednnGemm::~OnednnGemm() = default;

std::unique_ptr<OnednnGemm> OnednnGemm::create(const Shape&, int, int) { return nullptr; }

void OnednnGemm::run(int, const std::byte*, const std::byte*, float*) {
  throw Error(ExitCode::kBackend, "oneDNN isn't built in; report this");
}

std::string OnednnGemm::implementation() const { return ""; }

bool OnednnGemm::multiplies_bf16() { return false; }

bool OnednnGemm::multiplies_by_amx() { return false; }

std::string onednn_version() { return ""; }

}  // namespace gatefold
