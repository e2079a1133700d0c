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

struct ReferenceOptions {
  std::int64_t chunk_bytes = 8 << 20;  // of one weight matrix in memory at a time, at least one row
};

/// Computes FFN `spec` on x [tokens, H] (model dtype values, widened to fp32) from `source`:
/// weights and biases are rounded to `dtype` as the runtime does (a learnable beta is not),
/// everything else is float64, h is not rounded; nothing of the runtime's sharding, packing or
/// activation code is used. Weights stream a few rows at a time. Throws Error 65 where a tensor is
/// missing or has another shape than `spec` says, or where x or `spec` contradict themselves.
///
/// bound[t, j] holds for fp32 accumulation in any order, one rounding of h and one of y to `dtype`.
/// Every number carries two errors, u = 2^-24 and gamma(n) = n*u / (1 - n*u):
///   certain  the worst case: |error| <= certain, whatever the data and the roundings;
///   spread   a scale: |error| <= 8 * spread but with probability 2*exp(-8^2/2) = 2.5e-14
///            (Hoeffding), where roundings of different numbers are independent with mean 0
///            (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).
/// Used is likely = min(certain, 8 * spread). Step by step:
///   dot      z = sum w*v + b over n terms (b one of them) with S = sum |w*v|, Q^2 = sum (w*v)^2
///   and
///            P = the largest |partial sum| seen every 128 terms in storage order:
///              certain = sum |w|*certain_v + gamma(n + 1) * (S + sum |w|*certain_v)
///              spread^2 = sum (w*spread_v)^2 + (u * sqrt(n) * (Q + P^2/Q))^2
///            each rounding being at most u * |partial sum|. P^2/Q grows from Q, for data without a
///            pattern, to sqrt(n)*P for equal terms, where all roundings may go the same way. To
///            8 * spread comes |sum w * likely_v * sign(v)|: equal rows of gate and up have equal
///            errors, which add up.
///   act(z)   L * error_z + 8u * |z|, L = 1 (identity, relu), 1.1 (z*sigmoid(beta*z), any beta),
///            1.13 (both gelu); relu2: L = 2 * (|z| + error_z), and 8u * z^2. 8u * |z| is the room
///            for fp32 exp, tanh, erf and the rounding of their arguments.
///   product  error_a * (|b| + error_b) + |a| * error_b + u * |a*b|
///   rounding u_d * |v|, u_d = 2^-8 (bf16 has 8 significant bits), 2^-11 (f16), 2^-24 (f32); f16
///   also
///            2^-25, half its smallest step. y's own is added in full, after likely.
/// Each gets 2^-100 more for results that fp32 or a kernel may flush to zero. The bound is infinite
/// where a value plus its error may round to infinity (f16: from 65520 on), where sum |w*v| leaves
/// the range of fp32, and where anything is not finite: y is then what IEEE gives.
ReferenceResult reference_ffn(const FfnSpec& spec, const TensorSource& source, DType dtype,
                              std::span<const float> x, std::int64_t tokens,
                              const ReferenceOptions& options = {});

}  // namespace gatefold
