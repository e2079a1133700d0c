#pragma once

#include <cstdint>

#include "runtime/expert_rows.h"
#include "runtime/routing.h"
#include "runtime/vector_isa.h"

namespace gatefold {

/// Rows and outputs of one step of router_logits(): what stays in the caches.
constexpr std::int64_t kLogitRows = 8;
constexpr std::int64_t kLogitOutputs = 32;

/// Up to 8 rows and 32 outputs from these on.
void sum_logits(const LogitRows& io, std::int64_t first_row, std::int64_t first_output,
                VectorIsa isa = vector_isa());

/// One token: logits [E], correction [E] or null → ids and weights [k].
void choose_for_token(const RouteRule& rule, const float* logits, const float* correction,
                      std::int32_t* ids, float* weights, VectorIsa isa = vector_isa());

/// One token: logits [E] → P [E] and log-sum, see ScoredLogits.
void score_token(Score score, std::int64_t experts, const float* logits, float* scores,
                 float* log_sum, VectorIsa isa = vector_isa());

}  // namespace gatefold
