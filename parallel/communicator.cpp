#include "parallel/communicator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "parallel/shared_window.h"
#include "runtime/error.h"

namespace gatefold {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator() : Communicator(0, 1, &own_progress_) {}

  std::string description() const override { return "self"; }
  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    copy_own_pieces(0, sends, receives);
  }
  void all_gather_v(std::byte*, std::span<const std::int64_t>) override {}
  void broadcast(std::byte*, std::int64_t, int) override {}
  void barrier() override {}
  void all_reduce(float*, std::int64_t) override {}
  void reduce_scatter_v(float*, std::span<const std::int64_t>) override {}
  std::unique_ptr<Communicator> split(int) override { return make_self_communicator(); }
  std::unique_ptr<Communicator> split_by_host() override { return make_self_communicator(); }

 private:
  Progress own_progress_;
};

std::string no_answer_text(std::vector<int> late, double seconds, const char* what,
                           const Progress& progress) {
  // A rank that this one waits for may itself wait in vain.
  std::vector<int> missing = progress.missing();
  if (missing.empty()) missing = std::move(late);
  std::ranges::sort(missing);
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return fmt::format(
      "no answer{}{} for {} s in {} during {} (a peer is lost, stuck or slower than the "
      "deadline); look at its output, or raise --timeout",
      missing.empty() ? "" : " from rank ", fmt::join(missing, ", "), seconds, what,
      progress.phase());
}

}  // namespace

NoAnswerError::NoAnswerError(std::vector<int> late, double seconds, const char* what,
                             const Progress& progress)
    : NoAnswerError(no_answer_text(std::move(late), seconds, what, progress)) {}

std::int64_t Communicator::before_own(std::span<const std::int64_t> parts) const {
  return std::accumulate(parts.begin(), parts.begin() + rank(), std::int64_t{0});
}

std::unique_ptr<Communicator> Communicator::split_by_host() {
  if (&host() != this) return host().split_by_host();
  throw Error(
      ExitCode::kBackend,
      fmt::format("{} can't tell which ranks share a host; ask the communicator it was made "
                  "from",
                  description()));
}

std::unique_ptr<SharedWindow> Communicator::share(std::int64_t) { return nullptr; }

void copy_host_bytes(std::byte* out, const std::byte* in, std::int64_t bytes) {
  std::memcpy(out, in, static_cast<std::size_t>(bytes));
}

void copy_own_pieces(int rank, std::span<const Transfer> sends, std::span<const Transfer> receives,
                     const CopyBytes& copy) {
  const auto own = [rank](const Transfer& t) { return t.peer == rank && t.bytes > 0; };
  auto receive = std::find_if(receives.begin(), receives.end(), own);
  for (const Transfer& send : sends) {
    if (!own(send)) continue;
    const std::int64_t room = receive == receives.end() ? 0 : receive->bytes;
    if (room != send.bytes) {
      throw Error(ExitCode::kBackend,
                  fmt::format("rank {} sends itself {} bytes but receives {} (both lists of an "
                              "exchange must match); this is a fault of the caller",
                              rank, send.bytes, room));
    }
    copy(receive->data, send.data, send.bytes);
    receive = std::find_if(receive + 1, receives.end(), own);
  }
  if (receive == receives.end()) return;
  throw Error(ExitCode::kBackend,
              fmt::format("rank {} receives {} bytes from itself but sends none (both lists of an "
                          "exchange must match); this is a fault of the caller",
                          rank, receive->bytes));
}

std::unique_ptr<Communicator> make_self_communicator() {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace gatefold
