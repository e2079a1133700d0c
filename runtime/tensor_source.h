#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/range.h"

namespace gatefold {

struct TensorInfo {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
};

/// Rows and columns of the 2-D view of a tensor that read() slices.
struct Extent {
  std::int64_t rows = 1;
  std::int64_t columns = 1;
};
Extent extent_of(const std::vector<std::int64_t>& shape);

/// Named tensors that can be read slice by slice: a checkpoint directory, or weights made from a
/// seed. The one place where weights come from, so that a rank touches only what it owns.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  /// Nothing where the source has no such tensor. Throws Error 65 for a tensor whose stored type
  /// is none of f32, bf16, f16 (with the name and the type).
  virtual std::optional<TensorInfo> find(const std::string& name) const = 0;

  /// Reads the rectangle rows x cols of a 2-D tensor, dense and in the stored dtype, into `out`
  /// [rows.size(), cols.size()]. A tensor of more dimensions reads as [product of all but the last,
  /// last], a 1-D tensor of n elements as [1, n], a scalar as [1, 1].
  /// Throws Error 65 or 66 when the bytes can't be had.
  virtual void read(const std::string& name, Range rows, Range cols, std::byte* out) const = 0;

  /// For messages: where the tensors come from.
  virtual std::string description() const = 0;
};

/// As read(), widened to fp32 (exact for all three dtypes).
void read_as_float(const TensorSource& source, const std::string& name, Range rows, Range cols,
                   float* out);

/// As read(), converted to `dtype`: one rounding where it is narrower than what is stored.
void read_as(const TensorSource& source, const std::string& name, Range rows, Range cols,
             DType dtype, std::byte* out);

/// Converts n elements; exact where `to` holds all values of `from`, else rounded once.
void convert(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t n);

}  // namespace gatefold
