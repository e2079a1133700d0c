#include <algorithm>
#include <string>

#include "runtime/cuda_check.h"
#include "runtime/cuda_kernels.h"
#include "runtime/cuda_launch.h"
#include "runtime/cuda_shared.cuh"
// Needs the line above.
#include "runtime/cuda_kernels.cuh"
#include "runtime/error.h"

namespace gatefold::cuda {
namespace {

/// `copy` in bytes; `piece` bytes are a power of two.
void start_copy(PieceCopy copy, std::int64_t piece, const char* name, cudaStream_t stream) {
  if (copy.rows == 0 || copy.width == 0) return;
  with_unit(
      {address(copy.in), address(copy.out), copy.used, copy.width, copy.in_stride,
       copy.in_piece_stride, copy.out_stride, piece},
      [&]<typename Unit>(std::int64_t bytes) {
        for (std::int64_t* number :
             {&copy.used, &copy.width, &copy.in_stride, &copy.in_piece_stride, &copy.out_stride}) {
          *number /= bytes;
        }
        copy.piece_shift = std::countr_zero(static_cast<std::uint64_t>(piece / bytes));
        copy_pieces<Unit>
            <<<row_grid(copy.width, copy.rows, kThreads * kInFlight), kThreads, 0, stream>>>(copy);
      });
  check(cudaGetLastError(), name);
}

/// A row in one piece.
constexpr std::int64_t kWholeRow = std::int64_t{1} << 62;

template <DType kDType, int kMost>
void start_sum(const RootSum& sum, cudaStream_t stream) {
  RootList<kMost> list{};
  list.count = static_cast<int>(sum.roots.size());
  int below = 0;
  int depth = 0;
  for (std::size_t i = 0; i < sum.roots.size(); ++i) {
    list.roots[i] = sum.roots[i];
    list.merges[i] = static_cast<std::uint8_t>(sum.plan->merges[i]);
    if (sum.plan->merges[i] == 0) depth = std::max(depth, below);  // those under the pushed one
    below += 1 - sum.plan->merges[i];
  }
  const SumShape shape{sum.groups,  sum.rows, sum.row_stride,     sum.group_stride,    sum.bias,
                       sum.columns, sum.out,  sum.out_row_stride, sum.out_group_stride};
  // Fewer threads where the stack is deep: together they have 48 KiB.
  const int threads = depth <= 12 ? kSumThreads : kSumThreads / 2;
  const std::size_t shared = static_cast<std::size_t>(depth * threads) * sizeof(Eight);
  cuda::sum_roots<kDType, kMost>
      <<<row_grid(sum.groups * kGroup / kEight, sum.rows, threads), threads, shared, stream>>>(
          list, shape);
  check(cudaGetLastError(), "the kernel that sums roots");
}

}  // namespace

std::span<const int> compiled_for() {
  static constexpr int kTargets[] = {__CUDA_ARCH_LIST__};
  return kTargets;
}

void copy_rows(std::byte* out, std::int64_t out_stride, const std::byte* in, std::int64_t in_stride,
               std::int64_t rows, std::int64_t bytes, cudaStream_t stream) {
  start_copy({in, out, rows, rows, bytes, bytes, in_stride, 0, out_stride, 0}, kWholeRow,
             "the kernel that copies rows", stream);
}

void pad_rows(const std::byte* in, std::int64_t in_stride, std::int64_t rows, std::int64_t bytes,
              std::byte* out, std::int64_t padded_rows, std::int64_t width, cudaStream_t stream) {
  start_copy({in, out, padded_rows, rows, bytes, width, in_stride, 0, width, 0}, kWholeRow,
             "the kernel that tiles rows", stream);
}

void ungroup(const std::byte* in, std::int64_t element, std::int64_t rows, std::int64_t columns,
             std::byte* out, cudaStream_t stream) {
  const std::int64_t piece = kGroup * element;
  const std::int64_t bytes = columns * element;
  start_copy({in, out, rows, rows, bytes, bytes, piece, rows * piece, bytes, 0}, piece,
             "the kernel that joins groups", stream);
}

void pack_weight_rows(const Weight& weight, std::int64_t first_row, std::int64_t rows,
                      const std::byte* in, cudaStream_t stream) {
  const WeightShape& shape = weight.shape;
  const std::int64_t element = size_of(weight.storage);
  const std::int64_t row_bytes = shape.inputs * element;
  const std::int64_t padded_bytes = shape.padded_inputs() * element;
  if (rows == 0 || row_bytes == 0) return;
  with_unit({address(in), row_bytes, padded_bytes}, [&]<typename Unit>(std::int64_t bytes) {
    pack_weight_rows<Unit><<<row_grid(row_bytes / bytes, rows, kThreads), kThreads, 0, stream>>>(
        WeightRows{in, weight.data.data(), first_row, rows, row_bytes / bytes, padded_bytes / bytes,
                   shape.outputs, shape.gated});
  });
  check(cudaGetLastError(), "the kernel that packs weights");
}

void activate_tile(const Activation& activation, const WeightShape& shape, const float* c,
                   const float* bias, std::int64_t rows, DType dtype, std::byte* h,
                   cudaStream_t stream) {
  if (rows == 0 || shape.outputs == 0) return;
  const std::int64_t eights = shape.padded_outputs() / kEight;
  const TileActivation tile{activation, c,    rows, shape.groups() * kGroup,
                            eights,     bias, h,    shape.outputs};
  const dim3 grid = row_grid(eights, rows, kThreads);
  with_dtype(dtype, [&]<DType kDType>() {
    with_kind(activation.kind, [&]<ActivationKind kKind>() {
      if (shape.gated) {
        activate_tile<kKind, true, kDType><<<grid, kThreads, 0, stream>>>(tile);
      } else {
        activate_tile<kKind, false, kDType><<<grid, kThreads, 0, stream>>>(tile);
      }
    });
  });
  check(cudaGetLastError(), "the kernel that activates");
}

void merge_tile(const float* c, std::int64_t rows, const Partials& stack, std::int64_t first_row,
                int height, int merges, cudaStream_t stream) {
  if (rows == 0 || stack.groups == 0) return;
  const TileMerge tile{c,
                       rows,
                       stack.groups * kGroup,
                       stack.data + first_row * stack.row_stride,
                       stack.groups,
                       stack.row_stride,
                       stack.group_stride,
                       stack.slot_stride,
                       height,
                       merges};
  merge_tile<<<row_grid(stack.groups * kGroup / kEight, rows, kThreads), kThreads, 0, stream>>>(
      tile);
  check(cudaGetLastError(), "the kernel that merges partial sums");
}

void sum_roots(const RootSum& sum, cudaStream_t stream) {
  if (sum.groups == 0 || sum.rows == 0) return;
  const std::size_t roots = sum.roots.size();
  if (roots > kMostRoots) {
    throw Error(ExitCode::kUsage, "a sum of " + std::to_string(roots) +
                                      " roots (the CUDA device adds 1024 at most); use fewer "
                                      "--blocks or a smaller --tp");
  }
  with_dtype(sum.dtype, [&]<DType kDType>() {
    if (roots <= kFewRoots) {
      start_sum<kDType, kFewRoots>(sum, stream);
    } else {
      start_sum<kDType, kMostRoots>(sum, stream);
    }
  });
}

void plain_gemm(DType storage, const std::byte* a, std::int64_t rows, std::int64_t inputs,
                const std::byte* w, std::int64_t columns, float* c, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  const dim3 grid{static_cast<unsigned>(columns / kPlainTile),
                  static_cast<unsigned>(std::min(ceil_div(rows, kPlainTile), kMostBlocks))};
  with_dtype(storage, [&]<DType kDType>() {
    plain_gemm<kDType>
        <<<grid, kPlainSide * kPlainSide, 0, stream>>>(PlainGemm{a, w, c, rows, inputs, columns});
  });
  check(cudaGetLastError(), "the plain kernel");
}

}  // namespace gatefold::cuda
