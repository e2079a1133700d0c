#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <utility>

#include "launch/program.h"
#include "tests/faults/mishap.h"
#include "tests/faults/sum_faults.h"
#include "tests/faults/weight_faults.h"

// The program itself, with one fault planted by GATEFOLD_FAULT=<name>[@<point>][:<rank>]: one of
// weight_faults.h, sum_faults.h, the three on y below, self_check, or a mishap.h at a point:
//   loading   when the rank reads its first weight
//   exchange  before its roots go out
//   sent      after they have gone out, before it takes in the others'
namespace gatefold {
namespace {

Seams weight_seams(const MakeRead& make_read) {
  Seams seams;
  seams.wrap_source = [make_read](const TensorSource& inner, const FfnSpec& spec, Range columns,
                                  int rank) -> std::unique_ptr<TensorSource> {
    return std::make_unique<HookedSource>(inner, make_read(spec, columns, rank));
  };
  return seams;
}

Seams sum_seams(const HookedCommunicator::Exchange& exchange) {
  Seams seams;
  seams.wrap_tp = [exchange](Communicator& inner) -> std::unique_ptr<Communicator> {
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
  };
  return seams;
}

Seams mishap_seams(const Fault& fault) {
  if (fault.point == "loading") {
    Seams seams;
    seams.wrap_source = [fault](const TensorSource& source, const FfnSpec&, Range,
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
  return sum_seams([fault](Communicator& inner, std::span<const Transfer> sends,
                           std::span<const Transfer> receives) {
    const bool due = inner.rank() == fault.rank;
    if (due && fault.point == "sent") inner.exchange(sends, {});
    if (due) happen(fault);
    inner.exchange(due && fault.point == "sent" ? std::span<const Transfer>() : sends, receives);
  });
}

Seams seams_for(const Fault& fault) {
  if (const MakeRead make_read = weight_fault(fault)) return weight_seams(make_read);
  if (const auto exchange = sum_fault(fault)) return sum_seams(exchange);
  if (fault.is("bit_flipped") || fault.is("nan") || fault.is("y_zero")) {
    return output_seams(fault);
  }
  if (fault.is("self_check")) {
    Seams seams;
    seams.fail_self_check = [fault](int rank) { return rank == fault.rank; };
    return seams;
  }
  const bool at_point =
      fault.point == "loading" || fault.point == "exchange" || fault.point == "sent";
  if (is_mishap(fault) && at_point) return mishap_seams(fault);
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
