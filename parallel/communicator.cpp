#include "parallel/communicator.h"

#include <cstring>

namespace gatefold {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator() : Communicator(0, 1, &own_progress_) {}

  std::string description() const override { return "self"; }
  void exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override {
    for (std::size_t i = 0; i < sends.size(); ++i) {
      std::memcpy(receives[i].data, sends[i].data, static_cast<std::size_t>(sends[i].bytes));
    }
  }
  void all_gather_v(std::byte*, std::span<const std::int64_t>) override {}
  void broadcast(std::byte*, std::int64_t, int) override {}
  void barrier() override {}
  void all_reduce(float*, std::int64_t) override {}
  std::unique_ptr<Communicator> split(int) override { return make_self_communicator(); }

 private:
  Progress own_progress_;
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator() {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace gatefold
