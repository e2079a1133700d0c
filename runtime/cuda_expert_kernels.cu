#include <algorithm>
#include <string>

#include "runtime/cuda_check.h"
#include "runtime/cuda_expert_kernels.h"
#include "runtime/cuda_launch.h"
#include "runtime/cuda_shared.cuh"
// Needs the line above.
#include "runtime/cuda_expert_kernels.cuh"
#include "runtime/error.h"

namespace gatefold::cuda {
namespace {

/// What all GPUs have for a block without being asked.
constexpr std::int64_t kSharedBytes = 47 << 10;
constexpr std::int64_t kMostChoiceBlocks = 1 << 16;

/// `gather` in bytes.
void start_gather(RowGather gather, const char* name, cudaStream_t stream) {
  if (gather.rows == 0 || gather.width == 0) return;
  with_unit(
      {address(gather.in), address(gather.out), gather.used, gather.width, gather.in_stride},
      [&]<typename Unit>(std::int64_t bytes) {
        for (std::int64_t* number : {&gather.used, &gather.width, &gather.in_stride}) {
          *number /= bytes;
        }
        gather_rows<Unit>
            <<<row_grid(gather.width, gather.rows, kThreads * kInFlight), kThreads, 0, stream>>>(
                gather);
      });
  check(cudaGetLastError(), name);
}

template <int kOwn>
void start_logits(const LogitRows& io, cudaStream_t stream) {
  const std::int64_t down = std::min(ceil_div(io.rows, block_rows(kOwn)), kMostBlocks);
  const dim3 grid{static_cast<unsigned>(ceil_div(io.outputs, block_outputs(kOwn))),
                  static_cast<unsigned>(down)};
  const bool aligned = (address(io.x) | address(io.weight)) % 16 == 0 && io.hidden % kEight == 0;
  with_dtype(io.model, [&]<DType kDType>() {
    if (aligned) {
      router_logits<kDType, kOwn, true><<<grid, kLogitThreads, 0, stream>>>(io);
    } else {
      router_logits<kDType, kOwn, false><<<grid, kLogitThreads, 0, stream>>>(io);
    }
  });
  check(cudaGetLastError(), "the kernel of router logits");
}

}  // namespace

void gather_rows(std::byte* out, const std::byte* in, const std::int32_t* index, std::int64_t rows,
                 std::int64_t bytes, cudaStream_t stream) {
  start_gather({in, out, index, rows, rows, bytes, bytes, bytes}, "the kernel that gathers rows",
               stream);
}

void tile_chosen_rows(const InputRows& x, DType dtype, std::int64_t columns, const Tiles& out,
                      cudaStream_t stream) {
  const std::int64_t element = size_of(dtype);
  const std::int64_t rows = out.padded_rows();
  if (x.scale == nullptr) {
    start_gather({x.data, out.data, x.index, rows, out.rows, columns * element, out.width * element,
                  x.stride * element},
                 "the kernel that tiles gathered rows", stream);
    return;
  }
  if (rows == 0 || out.width == 0) return;
  const RowScale tile{x.data,   out.data, x.index,   x.scale, rows,
                      out.rows, columns,  out.width, x.stride};
  with_dtype(dtype, [&]<DType kDType>() {
    scale_rows<kDType><<<row_grid(out.width / kEight, rows, kThreads), kThreads, 0, stream>>>(tile);
  });
  check(cudaGetLastError(), "the kernel that scales rows");
}

void router_logits(const LogitRows& io, cudaStream_t stream) {
  if (io.rows == 0 || io.outputs == 0) return;
  if (io.rows < block_rows(2)) return start_logits<1>(io, stream);
  start_logits<2>(io, stream);
}

void choose_experts(const RouteRule& rule, const float* logits, const float* correction,
                    std::int64_t rows, std::int32_t* ids, float* weights, cudaStream_t stream) {
  check(rule);
  if (rows == 0) return;
  const std::int64_t bytes = (rule.experts + rule.groups) * std::int64_t{sizeof(std::int64_t)};
  const std::int64_t warps = std::clamp<std::int64_t>(kSharedBytes / bytes, 1, kMostWarps);
  const std::int64_t blocks = std::min(ceil_div(rows, warps), kMostChoiceBlocks);
  with_score(rule.score, [&]<Score kScore>() {
    choose_experts<kScore><<<static_cast<unsigned>(blocks), static_cast<unsigned>(warps * kWarp),
                             static_cast<std::size_t>(warps * bytes), stream>>>(
        ExpertChoice{rule, logits, correction, rows, ids, weights});
  });
  check(cudaGetLastError(), "the kernel that chooses experts");
}

void score_logits(const ScoredLogits& io, cudaStream_t stream) {
  if (io.rows == 0) return;
  const std::int64_t blocks = std::min(ceil_div(io.rows, kMostWarps), kMostChoiceBlocks);
  with_score(io.score, [&]<Score kScore>() {
    score_logits<kScore><<<static_cast<unsigned>(blocks), kMostWarps * kWarp, 0, stream>>>(io);
  });
  check(cudaGetLastError(), "the kernel that scores logits");
}

void weigh_rows(const WeighedRows& io, cudaStream_t stream) {
  if (io.count == 0 || io.groups == 0) return;
  weigh_rows<<<row_grid(io.groups * kGroup / kEight, io.count, kThreads), kThreads, 0, stream>>>(
      io);
  check(cudaGetLastError(), "the kernel that weighs rows");
}

void combine_rows(const CombinedRows& io, cudaStream_t stream) {
  if (std::ssize(io.shared) > kMaxShared) {
    throw Error(ExitCode::kUsage, "a layer of " + std::to_string(io.shared.size()) +
                                      " shared experts (the CUDA device adds " +
                                      std::to_string(kMaxShared) + " at most); use --device cpu");
  }
  if (io.tokens == 0 || io.columns == 0) return;
  SharedList shared{};
  std::copy(io.shared.begin(), io.shared.end(), shared.rows);
  shared.count = static_cast<int>(io.shared.size());
  const std::int64_t root_stride = io.root_stride > 0 ? io.root_stride : io.groups * kGroup;
  const CombineShape shape{io.sums,     io.begin,        io.roots,   io.merges,     io.tokens,
                           root_stride, io.first_column, io.columns, io.row_stride, io.y};
  const dim3 grid = row_grid(ceil_div(io.columns, kEight), io.tokens, kCombineThreads);
  constexpr std::size_t kBelow = kOpenBelow * kCombineThreads * sizeof(Eight);
  static_assert(kBelow <= kSharedBytes);
  with_dtype(io.dtype, [&]<DType kDType>() {
    combine_rows<kDType><<<grid, kCombineThreads, kBelow, stream>>>(shape, shared);
  });
  check(cudaGetLastError(), "the kernel that combines experts");
}

}  // namespace gatefold::cuda
