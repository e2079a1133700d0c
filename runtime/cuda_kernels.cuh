#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/activation_math.h"
#include "runtime/cuda_values.cuh"
#include "runtime/dtype.h"
#include "runtime/tensor_layout.h"

// Kernels of every layer: each gives the bits that the CPU device gives.

namespace gatefold::cuda {

/// Rows of `width` units, from `in` as far as `used` and `in_rows` go, zeros beyond. A row of `in`
/// lies in pieces of 2^piece_shift units.
struct PieceCopy {
  const std::byte* in;
  std::byte* out;
  std::int64_t rows, in_rows;
  std::int64_t used, width;
  std::int64_t in_stride, in_piece_stride, out_stride;  // units
  int piece_shift;
};

template <typename Unit>
__global__ void copy_pieces(PieceCopy copy) {
  const auto* in = reinterpret_cast<const Unit*>(copy.in);
  auto* out = reinterpret_cast<Unit*>(copy.out);
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x * kInFlight + threadIdx.x;
  const std::int64_t mask = (std::int64_t{1} << copy.piece_shift) - 1;
  for (std::int64_t row = blockIdx.y; row < copy.rows; row += gridDim.y) {
    const std::int64_t used = row < copy.in_rows ? copy.used : 0;
    Unit values[kInFlight];
    for (int i = 0; i < kInFlight; ++i) {
      const std::int64_t unit = first + static_cast<std::int64_t>(i) * blockDim.x;
      const std::int64_t piece = unit >> copy.piece_shift;
      values[i] = unit < used
                      ? in[row * copy.in_stride + piece * copy.in_piece_stride + (unit & mask)]
                      : Unit{};
    }
    for (int i = 0; i < kInFlight; ++i) {
      const std::int64_t unit = first + static_cast<std::int64_t>(i) * blockDim.x;
      if (unit < copy.width) out[row * copy.out_stride + unit] = values[i];
    }
  }
}

/// Rows of a weight to the rows that they have in its packing: gated groups are 32 gates and then
/// their 32 ups.
struct WeightRows {
  const std::byte* in;  // [rows][inputs] units
  std::byte* out;       // [groups*64][padded_inputs] units
  std::int64_t first_row, rows;
  std::int64_t inputs, padded_inputs;  // units
  std::int64_t outputs;
  bool gated;
};

template <typename Unit>
__global__ void pack_weight_rows(WeightRows weight) {
  const auto* in = reinterpret_cast<const Unit*>(weight.in);
  auto* out = reinterpret_cast<Unit*>(weight.out);
  const std::int64_t unit = place_in_row();
  if (unit >= weight.inputs) return;
  for (std::int64_t r = blockIdx.y; r < weight.rows; r += gridDim.y) {
    const std::int64_t row = weight.first_row + r;
    const bool up = weight.gated && row >= weight.outputs;
    const std::int64_t output = up ? row - weight.outputs : row;
    const std::int64_t packed =
        weight.gated ? output / kGatedGroup * kGroup + output % kGatedGroup + (up ? kGatedGroup : 0)
                     : output;
    out[packed * weight.padded_inputs + unit] = in[r * weight.inputs + unit];
  }
}

/// A tile's products to hidden values: see ActivationRows.
struct TileActivation {
  Activation activation;
  const float* c;  // [rows][ld]
  std::int64_t rows, ld;
  std::int64_t eights;  // of a row of h
  const float* bias;    // [ld], may be null
  std::byte* h;         // [rows][8*eights]
  std::int64_t valid;   // columns of h; those after them are +0
};

template <ActivationKind kKind, bool kGated, DType kDType>
__global__ void __launch_bounds__(kThreads) activate_tile(TileActivation tile) {
  const std::int64_t eight = place_in_row();
  if (eight >= tile.eights) return;
  constexpr std::int64_t kOfGroup = (kGated ? kGatedGroup : kGroup) / kEight;
  const std::int64_t column = eight / kOfGroup * kGroup + eight % kOfGroup * kEight;
  Eight gate_bias{};
  Eight up_bias{};
  if (tile.bias != nullptr) {
    gate_bias = load_eight(tile.bias + column);
    if constexpr (kGated) up_bias = load_eight(tile.bias + column + kGatedGroup);
  }
  for (std::int64_t row = blockIdx.y; row < tile.rows; row += gridDim.y) {
    const float* c = tile.c + row * tile.ld + column;
    Eight gate = load_eight(c);
    Eight up{};
    if constexpr (kGated) up = load_eight(c + kGatedGroup);
    if (tile.bias != nullptr) {
      gate = add(gate, gate_bias);
      up = add(up, up_bias);
    }
    float z[kEight];
    float factor[kEight];
    unpack(gate, z);
    unpack(up, factor);
    for (int i = 0; i < kEight; ++i) {
      if constexpr (kGated) {
        z[i] = gate_times_up<kKind>(tile.activation, z[i], factor[i]);
      } else {
        z[i] = activate<kKind>(tile.activation, z[i]);
      }
      if (eight * kEight + i >= tile.valid) z[i] = 0.0F;
    }
    auto* h = reinterpret_cast<Stored<kDType>*>(tile.h);
    store_eight<kDType>(z, h + (row * tile.eights + eight) * kEight);
  }
}

/// A tile's products p onto the stack: `merges` times p = slot[--height] + p, then slot[height] =
/// p.
struct TileMerge {
  const float* c;  // [rows][ld]
  std::int64_t rows, ld;
  float* stack;  // slot 0 of the tile's first row
  std::int64_t groups, row_stride, group_stride, slot_stride;
  int height, merges;
};

__global__ void __launch_bounds__(kThreads) merge_tile(TileMerge tile) {
  constexpr std::int64_t kOfGroup = kGroup / kEight;
  const std::int64_t eight = place_in_row();
  if (eight >= tile.groups * kOfGroup) return;
  const std::int64_t in_slot = eight / kOfGroup * tile.group_stride + eight % kOfGroup * kEight;
  for (std::int64_t row = blockIdx.y; row < tile.rows; row += gridDim.y) {
    float* slot = tile.stack + in_slot + row * tile.row_stride;
    Eight sum = load_eight(tile.c + row * tile.ld + eight * kEight);
    for (int m = 1; m <= tile.merges; ++m) {
      sum = add(load_eight(slot + (tile.height - m) * tile.slot_stride), sum);
    }
    auto* to = reinterpret_cast<float4*>(slot + (tile.height - tile.merges) * tile.slot_stride);
    to[0] = sum.low;
    to[1] = sum.high;
  }
}

/// See RootSum. The roots and the plan travel as kernel arguments.
template <int kMost>
struct RootList {
  const float* roots[static_cast<std::size_t>(kMost)];
  std::uint8_t merges[static_cast<std::size_t>(kMost)];
  int count;
};
struct SumShape {
  std::int64_t groups, rows, row_stride, group_stride;
  const float* bias;  // [columns], may be null
  std::int64_t columns;
  std::byte* out;
  std::int64_t out_row_stride, out_group_stride;
};
constexpr int kFewRoots = 16;
constexpr int kMostRoots = 1024;
constexpr int kSumThreads = 128;

template <DType kDType, int kMost>
__global__ void __launch_bounds__(kSumThreads) sum_roots(RootList<kMost> list, SumShape shape) {
  // The top of the stack is in registers, what lies below it here: [slot][half][thread].
  DYNAMIC_SHARED(float4, below);
  constexpr std::int64_t kOfGroup = kGroup / kEight;
  const std::int64_t eight = place_in_row();
  if (eight >= shape.groups * kOfGroup) return;
  const std::int64_t group = eight / kOfGroup;
  const std::int64_t column = eight % kOfGroup * kEight;
  const auto slot = [&](int height, int half) -> float4& {
    return below[(height * 2 + half) * static_cast<int>(blockDim.x) +
                 static_cast<int>(threadIdx.x)];
  };
  for (std::int64_t row = blockIdx.y; row < shape.rows; row += gridDim.y) {
    const std::int64_t at = group * shape.group_stride + row * shape.row_stride + column;
    Eight top = load_eight(list.roots[0] + at);
    int height = 0;  // values below the top
    for (int first = 1; first < list.count; first += kInFlight) {
      Eight values[kInFlight];
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i < list.count) values[i] = load_eight(list.roots[first + i] + at);
      }
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i >= list.count) continue;
        const int merges = list.merges[first + i];
        if (merges == 0) {
          slot(height, 0) = top.low;
          slot(height, 1) = top.high;
          ++height;
          top = values[i];
          continue;
        }
        top = add(top, values[i]);
        for (int m = 1; m < merges; ++m) {
          --height;
          top = add(Eight{slot(height, 0), slot(height, 1)}, top);
        }
      }
    }
    float values[kEight];
    unpack(top, values);
    const std::int64_t left = shape.columns - group * kGroup - column;
    // x + 0 changes no bits but those of -0, so a layer without a bias skips it.
    for (int i = 0; i < kEight && shape.bias != nullptr; ++i) {
      if (i < left) values[i] = __fadd_rn(values[i], shape.bias[group * kGroup + column + i]);
    }
    auto* out = reinterpret_cast<Stored<kDType>*>(shape.out) + group * shape.out_group_stride +
                row * shape.out_row_stride + column;
    if (left >= kEight && aligned16(out)) {
      store_eight<kDType>(values, out);
    } else {
      for (int i = 0; i < kEight; ++i) {
        if (i < left) out[i] = rounded<kDType>(values[i]);
      }
    }
  }
}

/// c = a · wᵀ, each element summed in the order of k with one rounding per product and per sum: the
/// kernel that needs no library, and whose bits are those of plain_gemm().
struct PlainGemm {
  const std::byte* a;                  // [rows][inputs]
  const std::byte* w;                  // [columns][inputs]
  float* c;                            // [rows][columns]
  std::int64_t rows, inputs, columns;  // inputs and columns are multiples of 64
};
constexpr int kPlainTile = 64;  // of c, rows and columns
constexpr int kPlainStep = 16;  // of k
constexpr int kPlainOwn = 4;    // rows and columns of a thread
constexpr int kPlainSide = kPlainTile / kPlainOwn;

template <DType kDType>
__global__ void __launch_bounds__(kPlainSide* kPlainSide) plain_gemm(PlainGemm gemm) {
  using Element = Stored<kDType>;
  __shared__ float a_part[kPlainStep][kPlainTile + 1];
  __shared__ float w_part[kPlainStep][kPlainTile + 1];
  const auto* a = reinterpret_cast<const Element*>(gemm.a);
  const auto* w = reinterpret_cast<const Element*>(gemm.w);
  const int thread = static_cast<int>(threadIdx.x);
  const int x = thread % kPlainSide;
  const int y = thread / kPlainSide;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kPlainTile;
  const std::int64_t step_rows = static_cast<std::int64_t>(gridDim.y) * kPlainTile;
  for (std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kPlainTile;
       first_row < gemm.rows; first_row += step_rows) {
    float sum[kPlainOwn][kPlainOwn] = {};
    for (std::int64_t k = 0; k < gemm.inputs; k += kPlainStep) {
      for (int i = thread; i < kPlainTile * kPlainStep; i += kPlainSide * kPlainSide) {
        const int line = i / kPlainStep;
        const int depth = i % kPlainStep;
        const std::int64_t row = first_row + line;
        a_part[depth][line] =
            row < gemm.rows ? widened<kDType>(a[row * gemm.inputs + k + depth]) : 0.0F;
        w_part[depth][line] = widened<kDType>(w[(first_column + line) * gemm.inputs + k + depth]);
      }
      __syncthreads();
      for (int depth = 0; depth < kPlainStep; ++depth) {
        for (int r = 0; r < kPlainOwn; ++r) {
          for (int c = 0; c < kPlainOwn; ++c) {
            sum[r][c] = __fadd_rn(sum[r][c], __fmul_rn(a_part[depth][y + r * kPlainSide],
                                                       w_part[depth][x + c * kPlainSide]));
          }
        }
      }
      __syncthreads();
    }
    for (int r = 0; r < kPlainOwn; ++r) {
      const std::int64_t row = first_row + y + r * kPlainSide;
      for (int c = 0; c < kPlainOwn && row < gemm.rows; ++c) {
        gemm.c[row * gemm.columns + first_column + x + c * kPlainSide] = sum[r][c];
      }
    }
  }
}

}  // namespace gatefold::cuda
