#include "tests/fake_gpu/settings.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "tests/fake_gpu/fake_cudart.h"

namespace gatefold_fake {
namespace {

long long number(const std::string& text, const std::string& name) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 0);
  if (text.empty() || *end != '\0') {
    complain(name + ": not a number: \"" + text + "\"");
    std::_Exit(64);
  }
  return value;
}

template <typename Visit>
void for_each_item(const char* list, Visit visit) {
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) visit(item);
}

// Without it a program could take the stand-ins for a GPU.
[[gnu::constructor]] void refuse_or_warn() {
  const char* wanted = std::getenv("GATEFOLD_FAKE_GPU");
  if (wanted == nullptr || std::string_view(wanted) != "1") {
    std::fputs(
        "FAKE GPU: this libcudart is a stand-in for tests (it computes on the CPU); set "
        "GATEFOLD_FAKE_GPU=1 to use it, or mend LD_LIBRARY_PATH\n",
        stderr);
    std::_Exit(69);
  }
  if (rank() == 0) std::fputs("FAKE GPU: results prove logic only\n", stderr);
}

}  // namespace

int rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (const char* value = std::getenv(name)) return std::atoi(value);
  }
  return 0;
}

long long setting(const std::string& name, long long fallback) {
  const std::string variable = "GATEFOLD_FAKE_GPU_" + name;
  const char* list = std::getenv(variable.c_str());
  if (list == nullptr) return fallback;
  const std::string mine = std::to_string(rank()) + ":";
  long long value = fallback;
  bool for_me = false;
  for_each_item(list, [&](const std::string& item) {
    if (item.find(':') == std::string::npos) {
      if (!for_me) value = number(item, variable);
    } else if (item.rfind(mine, 0) == 0) {
      value = number(item.substr(mine.size()), variable);
      for_me = true;
    }
  });
  return value;
}

namespace {

using Calls = std::map<std::string, long long, std::less<>>;

Calls& calls() {
  static auto& all = *new Calls;  // outlives whoever asks
  return all;
}

/// Does the list in `variable` name this call of `point`?
bool listed(const char* variable, std::string_view point, long long call) {
  const char* list = std::getenv(variable);
  if (list == nullptr) return false;
  bool wanted = false;
  for_each_item(list, [&](std::string item) {
    if (const auto at = item.find('@'); at != std::string::npos) {
      if (number(item.substr(at + 1), variable) != rank()) return;
      item.resize(at);
    }
    const auto colon = item.find(':');
    if (item.substr(0, colon) != point) return;
    const std::string which = colon == std::string::npos ? "" : item.substr(colon + 1);
    wanted = wanted || number(which, variable) == call;
  });
  if (wanted) {
    complain("planted: " + std::string(point) + ":" + std::to_string(call) + " by " + variable);
  }
  return wanted;
}

[[gnu::destructor]] void tell_calls() {
  if (std::getenv("GATEFOLD_FAKE_GPU_COUNT") == nullptr) return;
  for (const auto& [point, count] : calls())
    complain("calls of " + point + ": " + std::to_string(count));
}

}  // namespace

bool fault(std::string_view point) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const long long call = ++calls()[std::string(point)];
  if (listed("GATEFOLD_FAKE_GPU_KILL", point, call)) std::raise(SIGKILL);
  if (listed("GATEFOLD_FAKE_GPU_STOP", point, call)) std::raise(SIGSTOP);
  return listed("GATEFOLD_FAKE_GPU_FAIL", point, call);
}

void complain(const std::string& text) {
  const std::string line = "FAKE GPU [rank " + std::to_string(rank()) + "]: " + text + "\n";
  // One write, so that lines of several ranks stay whole.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace gatefold_fake

long long cudaFakeSetting(const char* name, long long fallback) {
  return gatefold_fake::setting(name, fallback);
}
int cudaFakeRank() { return gatefold_fake::rank(); }
int cudaFakeFault(const char* point) { return gatefold_fake::fault(point) ? 1 : 0; }
