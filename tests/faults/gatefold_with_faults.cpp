#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/program.h"
#include "tests/faults/expert_faults.h"
#include "tests/faults/hooked_adder.h"
#include "tests/faults/mishap.h"
#include "tests/faults/sum_faults.h"
#include "tests/faults/weight_faults.h"
#include "tests/runtime/counting_device.h"

// The program itself, with one fault planted by GATEFOLD_FAULT=<name>[@<point>][:<rank>]: one of
// weight_faults.h, sum_faults.h, expert_faults.h, those on y below, self_check, roots_turned, or a
// mishap.h at a point:
//   loading   when the rank reads its first weight
//   exchange  before its roots go out
//   sent      after they have gone out, before it takes in the others'
//   adding    as it adds, in shared memory between two fences
//   dispatch, combine   before rows go to their experts, before sums come home
//   weigh     before the sums of its first expert with rows
namespace gatefold {
namespace {

Seams weight_seams(const Fault& fault, const MakeRead& make_read) {
  Seams seams;
  seams.wrap_source = [fault, make_read](const TensorSource& inner, const LayerSpec& spec,
                                         Range columns, int rank) -> std::unique_ptr<TensorSource> {
    const auto* moe = std::get_if<MoeSpec>(&spec);
    return std::make_unique<HookedSource>(
        inner, moe != nullptr ? expert_low_bit(fault, *moe, rank)
                              : make_read(std::get<FfnSpec>(spec), columns, rank));
  };
  return seams;
}

Seams sum_seams(const HookedCommunicator::Exchange& exchange) {
  Seams seams;
  seams.wrap_exchanges = [exchange](Communicator& inner) -> std::unique_ptr<Communicator> {
    return std::make_unique<HookedCommunicator>(inner, exchange);
  };
  return seams;
}

/// Faults of the finished y [T, H], of any dtype: all bits set are a NaN in each of them.
Seams output_seams(const Fault& fault) {
  Seams seams;
  seams.after_forward = [fault](std::vector<std::byte>& y, int rank, int ranks) {
    if (fault.is("bit_flipped") && rank == ranks - 1) y.back() ^= std::byte{1};
    if (rank != fault.rank) return;
    if (fault.is("nan")) std::fill_n(y.begin(), 4, std::byte{0xff});
    if (fault.is("y_zero")) std::fill(y.begin(), y.end(), std::byte{0});
    if (fault.is("y_turned")) std::rotate(y.begin(), y.begin() + std::ssize(y) / 2, y.end());
  };
  return seams;
}

Seams adder_seams(const Fault& fault, const HookedAdder::Hook& hook) {
  Seams seams;
  seams.wrap_device = [fault, hook](Device& device, int rank) -> std::unique_ptr<Device> {
    if (rank != fault.rank) return nullptr;
    return std::make_unique<HookedAdder>(device, hook);
  };
  return seams;
}

/// A device to which something happens as it first weighs rows.
class MishapDevice final : public testing::CountingDevice {
 public:
  MishapDevice(Device& inner, const Fault& fault) : CountingDevice(inner), fault_(fault) {}
  void weigh_rows(const WeighedRows& io) override {
    if (std::exchange(due_, false)) happen(fault_);
    CountingDevice::weigh_rows(io);
  }

 private:
  Fault fault_;
  bool due_ = true;
};

Seams mishap_seams(const Fault& fault) {
  if (fault.point == "adding") {
    return adder_seams(fault, [fault, due = true](std::vector<const float*>&) mutable {
      if (std::exchange(due, false)) happen(fault);
    });
  }
  if (fault.point == "weigh") {
    Seams seams;
    seams.wrap_device = [fault](Device& device, int rank) -> std::unique_ptr<Device> {
      if (rank != fault.rank) return nullptr;
      return std::make_unique<MishapDevice>(device, fault);
    };
    return seams;
  }
  if (fault.point == "loading") {
    Seams seams;
    seams.wrap_source = [fault](const TensorSource& source, const LayerSpec&, Range,
                                int rank) -> std::unique_ptr<TensorSource> {
      return std::make_unique<HookedSource>(
          source, [fault, rank, due = rank == fault.rank](const TensorSource& inner,
                                                          const std::string& name, Range rows,
                                                          Range cols, std::byte* out) mutable {
            if (std::exchange(due, false)) happen(fault);
            inner.read(name, rows, cols, out);
          });
    };
    return seams;
  }
  return sum_seams([fault, call = 0](Communicator& inner, std::span<const Transfer> sends,
                                     std::span<const Transfer> receives) mutable {
    const bool due = inner.rank() == fault.rank && is_at(fault, ++call);
    std::vector<Transfer> left(sends.begin(), sends.end());
    if (due && fault.point == "sent") {
      const auto own = std::ranges::stable_partition(
          left, [&](const Transfer& t) { return t.peer == inner.rank(); });
      inner.exchange(std::vector<Transfer>(own.begin(), own.end()), {});
      left.erase(own.begin(), own.end());
    }
    if (due) happen(fault);
    inner.exchange(left, receives);
  });
}

Seams seams_for(const Fault& fault) {
  if (const MakeRead make_read = weight_fault(fault)) return weight_seams(fault, make_read);
  if (const auto exchange = sum_fault(fault)) return sum_seams(exchange);
  if (Seams seams = expert_seams(fault);
      seams.alter_experts || seams.wrap_device || seams.wrap_exchanges) {
    return seams;
  }
  if (fault.is("bit_flipped") || fault.is("nan") || fault.is("y_zero") || fault.is("y_turned")) {
    return output_seams(fault);
  }
  if (fault.is("roots_turned")) {  // not between messages: in what the ranks share
    return adder_seams(fault, [](std::vector<const float*>& roots) {
      std::rotate(roots.begin(), roots.begin() + 1, roots.end());
    });
  }
  if (fault.is("self_check")) {
    Seams seams;
    seams.fail_self_check = [fault](int rank) { return rank == fault.rank; };
    return seams;
  }
  constexpr std::array<std::string_view, 7> kPoints{"loading",  "exchange", "sent", "adding",
                                                    "dispatch", "combine",  "weigh"};
  if (is_mishap(fault) && std::ranges::find(kPoints, fault.point) != kPoints.end())
    return mishap_seams(fault);
  throw std::invalid_argument("no fault of that name and point");
}

}  // namespace
}  // namespace gatefold

int main(int argc, char** argv) {
  gatefold::Seams seams;
  const char* text = std::getenv("GATEFOLD_FAULT");
  try {
    if (text != nullptr) seams = gatefold::seams_for(gatefold::parse_fault(text));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "GATEFOLD_FAULT=%s: %s\n", text, error.what());
    return 2;
  }
  return gatefold::run_program(argc, argv, seams);
}
