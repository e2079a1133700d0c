#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/ffn_spec.h"
#include "runtime/dtype.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// What one dense layer should give for some tokens, by plain float64 arithmetic, and how far an
/// honest runtime may be from it.
struct ReferenceResult {
  std::vector<double> y;      // [tokens, H]
  std::vector<double> bound;  // [tokens, H], absolute, > 0
};

/// Computes FFN `spec` on x [tokens, hidden] (model dtype values, widened to fp32) from `source`:
/// weights are rounded to `dtype` as the runtime does, everything else is float64; nothing of the
/// runtime's sharding, packing or activation code is used. Weights stream a few rows at a time.
///
/// bound[t, j] is a worst-case error of the runtime's arithmetic (fp32 accumulation in any order,
/// one rounding of h and one of y to `dtype`), from sums of |W||x| carried through both GEMMs.
/// Non-finite values: y is what IEEE gives; the bound there is infinite.
ReferenceResult reference_ffn(const FfnSpec& spec, const TensorSource& source, DType dtype,
                              std::span<const float> x, std::int64_t tokens);

}  // namespace gatefold
