#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/moe_spec.h"
#include "layers/reference.h"
#include "runtime/dtype.h"
#include "runtime/tensor_source.h"

namespace gatefold {

/// A token that no honest rounding sends where the runtime sent it.
struct WrongRoute {
  std::int64_t token = 0;
  std::vector<std::int32_t> expected;  // [k] the reference's choice, the best first
  std::vector<std::int32_t> found;     // [k] the runtime's, as it gave them
};

struct MoeReferenceResult : ReferenceResult {
  std::vector<std::int32_t> ids;         // [tokens, k] whose experts y was computed with
  std::vector<double> weights;           // [tokens, k] of those ids
  std::vector<double> weight_bounds;     // [tokens, k] absolute, > 0
  std::int64_t near_ties = 0;            // tokens whose expert set differs, as rounding allows
  std::vector<WrongRoute> wrong_routes;  // by token
};

/// Computes mixture of experts `spec` on x [tokens, H] as reference_ffn does a dense layer, with
/// the same errors and refusals: float64, no code of the runtime, weights a few rows at a time and
/// only of experts that tokens go to, one expert after the other. Router, its biases and the shared
/// gate stay fp32 as stored.
///
/// `ids` [tokens, k] is the runtime's choice, in any order within a token, but of a sparse mixer in
/// that in which they were chosen; empty: there is none. The reference routes by itself, by
/// RouteRule. Where ids of a token are another choice, then
///   near tie     they are the choice of some scores within the errors of the reference's: y is
///                computed with them;
///   wrong route  they aren't, or they repeat or leave [0, E): y is the reference's own.
///
/// Errors, by the rules of reference.h and with its `certain` and `spread`:
///   logit    a dot product with exact x and weights
///   score    with e = certain or 8 * spread of a logit, as the case may be:
///            softmax: s * (exp(d + sum s_i (exp(d_i) - 1)) - 1) with d = e + u * |l - max|, and
///            16u * s for two exps, gamma(E) * s (spread: u * sqrt(E) * s) for the sum
///            sigmoid: s (1 - s) * (exp(e) - 1), and 8u * s
///            sqrt(softplus): s * (exp(g e) - 1), g the slope of log(s) at l - e, and 8u * s
///            sparse mixer: that of a softmax; where an expert may be on either side of the margin,
///            by (l_chosen - l) / max(|l|, l_chosen) and its errors, also how far apart both are
///   choice   one rounding of s + correction; of groups, that of the sum of two
///   weight   quotients and products, each rounded
///   expert   input round(w * x), where weights are on the input, with the error of w and both
///            roundings; its y as in reference.h, but not rounded; times w, where on the output
///   sum      a dot product with weights 1 over the k experts and the shared ones, which are
///            multiplied by sigmoid(gate) where there is a gate; what the errors of w move it by
///            is added without a square, for a sum or a maximum in them is common to all experts;
///            y's rounding in full
///
/// `kept` [tokens, k]: 0 for choices, as `ids` has them, that a capacity has dropped (see
/// layers/reference_capacity.h); empty: none. spec.capacity isn't looked at: these tokens may be a
/// few of a step's.
MoeReferenceResult reference_moe(const MoeSpec& spec, const TensorSource& source, DType dtype,
                                 std::span<const float> x, std::int64_t tokens,
                                 std::span<const std::int32_t> ids = {},
                                 const ReferenceOptions& options = {},
                                 std::span<const std::uint8_t> kept = {});

/// The same without y: routes and reads no expert.
MoeReferenceResult reference_routes(const MoeSpec& spec, const TensorSource& source, DType dtype,
                                    std::span<const float> x, std::int64_t tokens,
                                    std::span<const std::int32_t> ids = {},
                                    const ReferenceOptions& options = {});

}  // namespace gatefold
