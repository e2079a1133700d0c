#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/activation.h"
#include "runtime/tensor_layout.h"

// Starts the device's own kernels on a stream. Each is checked: Error 70 where it can't start.

namespace gatefold::cuda {

/// What GPUs the kernels were compiled for, 900 for compute capability 9.0.
std::span<const int> compiled_for();

/// `rows` rows of `bytes` bytes, strides in bytes.
void copy_rows(std::byte* out, std::int64_t out_stride, const std::byte* in, std::int64_t in_stride,
               std::int64_t rows, std::int64_t bytes, cudaStream_t stream);
/// `rows` rows of `bytes` bytes, `in_stride` apart → [padded_rows][width bytes], zeros beyond.
void pad_rows(const std::byte* in, std::int64_t in_stride, std::int64_t rows, std::int64_t bytes,
              std::byte* out, std::int64_t padded_rows, std::int64_t width, cudaStream_t stream);
/// in [groups][rows][64] → out [rows, columns].
void ungroup(const std::byte* in, std::int64_t element, std::int64_t rows, std::int64_t columns,
             std::byte* out, cudaStream_t stream);
/// in [rows, inputs] on the device → rows [first_row, first_row + rows) of the weight.
void pack_weight_rows(const Weight& weight, std::int64_t first_row, std::int64_t rows,
                      const std::byte* in, cudaStream_t stream);

/// c [rows][64*groups], the products of one tile → h [rows][padded_outputs] in `dtype`.
void activate_tile(const Activation& activation, const WeightShape& shape, const float* c,
                   const float* bias, std::int64_t rows, DType dtype, std::byte* h,
                   cudaStream_t stream);
/// c [rows][64*groups] onto the stack, its rows from `first_row` on.
void merge_tile(const float* c, std::int64_t rows, const Partials& stack, std::int64_t first_row,
                int height, int merges, cudaStream_t stream);
/// Throws Error 64 for more than 1024 roots.
void sum_roots(const RootSum& sum, cudaStream_t stream);
/// c [rows][columns] = a [rows][inputs] · w [columns][inputs], inputs and columns multiples of 64.
void plain_gemm(DType storage, const std::byte* a, std::int64_t rows, std::int64_t inputs,
                const std::byte* w, std::int64_t columns, float* c, cudaStream_t stream);

}  // namespace gatefold::cuda
