#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "runtime/expert_rows.h"
#include "runtime/routing.h"
#include "runtime/tensor_layout.h"

// Starts the kernels of mixtures of experts on a stream; what they do is said in runtime/device.h.
// Each is checked: Error 70 where it can't start.

namespace gatefold::cuda {

void gather_rows(std::byte* out, const std::byte* in, const std::int32_t* index, std::int64_t rows,
                 std::int64_t bytes, cudaStream_t stream);
/// x has an index, a scale or both; tiles are in `dtype` too.
void tile_chosen_rows(const InputRows& x, DType dtype, std::int64_t columns, const Tiles& out,
                      cudaStream_t stream);
void router_logits(const LogitRows& io, cudaStream_t stream);
void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                    std::int64_t rows, std::int32_t* ids, float* weights, cudaStream_t stream);
void score_logits(const ScoredLogits& io, cudaStream_t stream);
void weigh_rows(const WeighedRows& io, cudaStream_t stream);
/// Throws Error 64 for more than kMaxShared shared experts.
void combine_rows(const CombinedRows& io, cudaStream_t stream);

}  // namespace gatefold::cuda
