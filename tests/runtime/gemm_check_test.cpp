// The start-up self-check must pass a kernel whose rows are independent, and catch every way in
// which one can fail that has been seen.
#include "runtime/gemm_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace gatefold {
namespace {

constexpr std::int64_t kInputs = 32;
constexpr std::int64_t kColumns = 64;

float element(DType storage, const std::byte* data, std::int64_t index) {
  if (storage == DType::kF32) {
    float value;
    std::memcpy(&value, data + 4 * index, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, data + 2 * index, 2);
  return bf16_to_float(bits);
}

/// One row, summed in the order of k from `first_k` on, around the end to it again.
void honest_row(DType storage, const std::byte* a, std::int64_t row, const std::byte* w, float* c,
                std::int64_t first_k = 0) {
  for (std::int64_t column = 0; column < kColumns; ++column) {
    float sum = 0.0F;
    for (std::int64_t i = 0; i < kInputs; ++i) {
      const std::int64_t k = (i + first_k) % kInputs;
      sum += element(storage, a, row * kInputs + k) * element(storage, w, k * kColumns + column);
    }
    c[row * kColumns + column] = sum;
  }
}

/// A kernel with a fault: called for each tile after the honest result is there.
using Fault = std::function<void(const std::byte* a, const std::byte* w, float* c)>;

GemmCheck check_with(std::int64_t rows, DType storage, const Fault& fault) {
  return check_row_bits(rows, kInputs, kColumns, storage,
                        [&](const std::byte* a, const std::byte* w, float* c) {
                          for (std::int64_t r = 0; r < rows; ++r) honest_row(storage, a, r, w, c);
                          fault(a, w, c);
                        });
}

float nudged(float value) { return std::nextafter(value, 100.0F); }

class GemmCheckTest : public ::testing::TestWithParam<std::pair<std::int64_t, DType>> {
 protected:
  std::int64_t rows() const { return GetParam().first; }
  DType storage() const { return GetParam().second; }
  GemmCheck with(const Fault& fault) const { return check_with(rows(), storage(), fault); }
};

TEST_P(GemmCheckTest, PassesAnHonestKernelWithAStableFingerprint) {
  const auto nothing = [](const std::byte*, const std::byte*, float*) {};
  const GemmCheck first = with(nothing);
  EXPECT_TRUE(first.passed);
  EXPECT_EQ(first.fingerprint, with(nothing).fingerprint);
}

TEST_P(GemmCheckTest, FailsWhereTheLastRowIsSummedInAnotherOrder) {
  EXPECT_FALSE(with([this](const std::byte* a, const std::byte* w, float* c) {
                 honest_row(storage(), a, rows() - 1, w, c, kInputs / 2);
               }).passed);
}

TEST_P(GemmCheckTest, FailsWhereOnePlaceInTheTileChangesOneBitOfOneColumn) {
  for (std::int64_t place = 0; place < rows(); ++place) {
    EXPECT_FALSE(with([place](const std::byte*, const std::byte*, float* c) {
                   float& value = c[place * kColumns + kColumns - 1];
                   value = nudged(value);
                 }).passed)
        << "place " << place;
  }
}

TEST_P(GemmCheckTest, FailsWhereRowsOfOneParityDiffer) {
  EXPECT_FALSE(with([this](const std::byte* a, const std::byte* w, float* c) {
                 for (std::int64_t r = 1; r < rows(); r += 2) honest_row(storage(), a, r, w, c, 16);
               }).passed);
}

TEST_P(GemmCheckTest, FailsWhereNaNOfANeighbourLeaks) {
  // As by multiplying a neighbour's value with zero.
  EXPECT_FALSE(with([this](const std::byte* a, const std::byte*, float* c) {
                 for (std::int64_t r = 0; r < rows(); ++r) {
                   const std::int64_t other = (r + 1) % rows();
                   c[r * kColumns] += 0.0F * element(storage(), a, other * kInputs);
                 }
               }).passed);
}

TEST_P(GemmCheckTest, FailsWhereTheNextRowsValuesDecide) {
  EXPECT_FALSE(with([this](const std::byte* a, const std::byte*, float* c) {
                 for (std::int64_t r = 0; r < rows(); ++r) {
                   const std::int64_t other = (r + 1) % rows();
                   if (element(storage(), a, other * kInputs) > 0.0F) {
                     c[r * kColumns + 5] = nudged(c[r * kColumns + 5]);
                   }
                 }
               }).passed);
}

TEST_P(GemmCheckTest, FailsWhereZeroPaddingDecides) {
  // As a kernel that looks for zero rows to skip work, and sums the others in another order.
  EXPECT_FALSE(with([this](const std::byte* a, const std::byte* w, float* c) {
                 bool padded = false;
                 for (std::int64_t r = 0; r < rows(); ++r) {
                   bool zero = true;
                   for (std::int64_t k = 0; k < kInputs; ++k) {
                     zero = zero && element(storage(), a, r * kInputs + k) == 0.0F;
                   }
                   padded = padded || zero;
                 }
                 if (!padded) return;
                 for (std::int64_t r = 0; r < rows(); ++r) honest_row(storage(), a, r, w, c, 8);
               }).passed);
}

TEST_P(GemmCheckTest, FailsWhereAnyRepeatDiffers) {
  for (const int bad_call : {1, 2, 3, 7}) {
    int calls = 0;
    const GemmCheck check = with([&](const std::byte*, const std::byte*, float* c) {
      if (calls++ == bad_call) {
        for (std::int64_t i = 0; i < rows() * kColumns; ++i) c[i] = nudged(c[i]);
      }
    });
    EXPECT_FALSE(check.passed) << "call " << bad_call;
  }
}

TEST_P(GemmCheckTest, FailsWhereResultsAreNotWrittenAtAll) {
  int calls = 0;
  const GemmCheck check = check_row_bits(rows(), kInputs, kColumns, storage(),
                                         [&](const std::byte* a, const std::byte* w, float* c) {
                                           if (calls++ > 0) return;
                                           for (std::int64_t r = 0; r < rows(); ++r) {
                                             honest_row(storage(), a, r, w, c);
                                           }
                                         });
  EXPECT_FALSE(check.passed);
}

TEST_P(GemmCheckTest, GivesAnotherFingerprintForAnotherOrderOfTheSum) {
  const auto whole_order = [this](std::int64_t first_k) {
    return with([this, first_k](const std::byte* a, const std::byte* w, float* c) {
      for (std::int64_t r = 0; r < rows(); ++r) honest_row(storage(), a, r, w, c, first_k);
    });
  };
  const GemmCheck other = whole_order(16);
  EXPECT_TRUE(other.passed);  // rows are independent here too
  EXPECT_NE(other.fingerprint, whole_order(0).fingerprint);
}

/// A kernel for `columns` columns of weights packed as the device packs them, group by group.
TileGemm columns_kernel(std::int64_t rows, std::int64_t columns, DType storage,
                        std::int64_t faulty_column, std::int64_t faulty_row) {
  return [=](const std::byte* a, const std::byte* w, float* c) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t column = 0; column < columns; ++column) {
        // The test's own packing is enough: a column's weights lie in its group.
        const std::int64_t group = column / 64 * 64 * kInputs;
        float sum = 0.0F;
        for (std::int64_t k = 0; k < kInputs; ++k) {
          sum += element(storage, a, r * kInputs + k) *
                 element(storage, w, group + k * 64 + column % 64);
        }
        const bool fault = column == faulty_column && r == faulty_row;
        c[r * columns + column] = fault ? nudged(sum) : sum;
      }
    }
  };
}

TEST_P(GemmCheckTest, PassesAKernelWhoseColumnsDontDependOnTheWidth) {
  for (const auto& [wide, narrow] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {128, 64}, {192, 64}, {192, 128}, {320, 192}, {64, 64}}) {
    EXPECT_TRUE(check_column_bits(rows(), kInputs, wide, narrow, storage(),
                                  columns_kernel(rows(), wide, storage(), -1, -1),
                                  columns_kernel(rows(), narrow, storage(), -1, -1)));
  }
}

TEST_P(GemmCheckTest, FailsWhereOneColumnOfTheWiderCallDiffersWhicheverItIs) {
  for (const auto& [wide, narrow] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{128, 64}, {192, 128}, {320, 192}}) {
    for (std::int64_t column = 0; column < wide; column += 21) {
      EXPECT_FALSE(check_column_bits(rows(), kInputs, wide, narrow, storage(),
                                     columns_kernel(rows(), wide, storage(), column, rows() - 1),
                                     columns_kernel(rows(), narrow, storage(), -1, -1)))
          << "column " << column << " of " << wide << ", pieces of " << narrow;
    }
  }
}

TEST_P(GemmCheckTest, FailsWhereOneColumnOfTheNarrowerCallDiffers) {
  for (const std::int64_t column : {0, 63, 100, 127}) {
    EXPECT_FALSE(check_column_bits(rows(), kInputs, 192, 128, storage(),
                                   columns_kernel(rows(), 192, storage(), -1, -1),
                                   columns_kernel(rows(), 128, storage(), column, 0)))
        << column;
  }
}

// A device whose panels are 128 columns wide and the last one 64; with its thread count come 192.
class WidthsCheckTest : public GemmCheckTest {
 protected:
  static constexpr std::int64_t kBase = 128;
  static constexpr std::int64_t kRest = 64;
  static constexpr std::int64_t kOther = 192;

  /// `fault` is in the GEMM of width `faulty` alone.
  WidthsCheck with_widths(const std::vector<std::int64_t>& widths, std::int64_t faulty,
                          const Fault& fault) const {
    std::map<std::int64_t, TileGemm> gemms;
    for (const std::int64_t columns : widths) {
      const TileGemm honest = columns_kernel(rows(), columns, storage(), -1, -1);
      gemms[columns] = [=](const std::byte* a, const std::byte* w, float* c) {
        honest(a, w, c);
        if (columns == faulty) fault(a, w, c);
      };
    }
    return check_widths(rows(), kInputs, storage(), kBase, kRest, gemms);
  }
  WidthsCheck with_fault_at(std::int64_t faulty, const Fault& fault) const {
    return with_widths({kRest, kBase, kOther}, faulty, fault);
  }

  /// Only a tile that holds a zero row, which no column check has, shows it.
  Fault zero_padding_decides() const {
    return [this](const std::byte* a, const std::byte*, float* c) {
      for (std::int64_t r = 0; r < rows(); ++r) {
        bool zero = true;
        for (std::int64_t k = 0; k < kInputs; ++k) {
          zero = zero && element(storage(), a, r * kInputs + k) == 0.0F;
        }
        if (zero) c[kRest - 1] = nudged(c[kRest - 1]);
      }
    };
  }
  static void nothing(const std::byte*, const std::byte*, float*) {}
};

TEST_P(WidthsCheckTest, PassesWhereAllWidthsAreHonest) {
  const WidthsCheck check = with_fault_at(0, nothing);
  EXPECT_TRUE(check.rows);
  EXPECT_TRUE(check.columns);
}

TEST_P(WidthsCheckTest, RowsFailWhereEitherWidthOfThePanelsFails) {
  for (const std::int64_t width : {kBase, kRest}) {
    const WidthsCheck check = with_fault_at(width, zero_padding_decides());
    EXPECT_FALSE(check.rows) << width;
    EXPECT_TRUE(check.columns) << width;
  }
}

TEST_P(WidthsCheckTest, OnlyPanelsAreLeftWhereTheRowsOfAnotherWidthFail) {
  const WidthsCheck check = with_fault_at(kOther, zero_padding_decides());
  EXPECT_TRUE(check.rows);
  EXPECT_FALSE(check.columns);
}

TEST_P(WidthsCheckTest, OnlyPanelsAreLeftWhereAWidthChangesAColumn) {
  for (const std::int64_t width : {kRest, kOther}) {
    // The same in every row and call: no row check sees it.
    const WidthsCheck check =
        with_fault_at(width, [=, this](const std::byte*, const std::byte*, float* c) {
          for (std::int64_t r = 0; r < rows(); ++r) {
            float& value = c[r * width + width - 1];
            value = nudged(value);
          }
        });
    EXPECT_TRUE(check.rows) << width;
    EXPECT_FALSE(check.columns) << width;
  }
}

TEST_P(WidthsCheckTest, TheFingerprintIsThatOfThePanelsWhateverOtherWidthsThereAre) {
  const std::uint64_t whole = with_fault_at(0, nothing).fingerprint;
  EXPECT_EQ(with_widths({kRest, kBase}, 0, nothing).fingerprint, whole);
  EXPECT_EQ(with_fault_at(kOther, zero_padding_decides()).fingerprint, whole);
  EXPECT_NE(with_widths({kBase}, 0, nothing).fingerprint, whole);
  for (const std::int64_t width : {kBase, kRest}) {
    const auto other_order = [](const std::byte*, const std::byte*, float* c) {
      c[0] = nudged(c[0]);
    };
    EXPECT_NE(with_fault_at(width, other_order).fingerprint, whole) << width;
  }
}

const auto kTiles = ::testing::Values(std::pair{16L, DType::kF32}, std::pair{16L, DType::kBf16},
                                      std::pair{48L, DType::kF32}, std::pair{64L, DType::kBf16});
const auto tile_name = [](const auto& test) {
  return std::to_string(test.param.first) + "_" + std::string(name_of(test.param.second));
};
INSTANTIATE_TEST_SUITE_P(Tiles, GemmCheckTest, kTiles, tile_name);
INSTANTIATE_TEST_SUITE_P(Tiles, WidthsCheckTest, kTiles, tile_name);

}  // namespace
}  // namespace gatefold
