#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/dtype.h"

namespace gatefold {

/// One oneDNN matmul of a fixed shape: c [rows, columns] fp32 = a [rows, inputs] · packed weights.
/// Created and run with a fixed thread count, because oneDNN 2.6 chooses kernels, and so bits, by
/// the number of threads it sees when it is created. One context per thread that runs it at the
/// same time: oneDNN's own scratchpad gives wrong results when shared.
class OnednnGemm {
 public:
  struct Shape {
    std::int64_t rows = 0;
    std::int64_t inputs = 0;   // a multiple of 32
    std::int64_t columns = 0;  // a multiple of 64
    DType storage = DType::kF32;
    auto operator<=>(const Shape&) const = default;
  };

  /// Returns null where oneDNN has no kernel for packed weights of this type on this CPU.
  static std::unique_ptr<OnednnGemm> create(const Shape& shape, int contexts, int threads);
  ~OnednnGemm();
  OnednnGemm(const OnednnGemm&) = delete;
  OnednnGemm& operator=(const OnednnGemm&) = delete;

  void run(int context, const std::byte* a, const std::byte* w, float* c);
  std::string implementation() const;

  /// Whether the CPU, as oneDNN may use it, multiplies bf16.
  static bool multiplies_bf16();
  /// Whether it does so by AMX.
  static bool multiplies_by_amx();

 private:
  struct State;
  explicit OnednnGemm(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace gatefold
