#include "layers/reference.h"

#include <fmt/format.h>

#include "layers/reference_layers.h"
#include "layers/reference_math.h"
#include "runtime/error.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

using namespace reference;

void check_arguments(const FfnSpec& spec, std::span<const float> x, std::int64_t tokens) {
  if (tokens < 0 || static_cast<std::int64_t>(x.size()) != tokens * spec.hidden_size) {
    throw Error(ExitCode::kData,
                fmt::format("reference input has {} values ({} tokens of width {} were promised); "
                            "pass x as [tokens, hidden_size]",
                            x.size(), tokens, spec.hidden_size));
  }
  check_spec(spec);
}

}  // namespace

ReferenceResult reference_ffn(const FfnSpec& spec, const TensorSource& source, DType dtype,
                              std::span<const float> x, std::int64_t tokens,
                              const ReferenceOptions& options) {
  check_arguments(spec, x, tokens);
  const std::int64_t hidden = spec.hidden_size;
  ReferenceResult result{std::vector<double>(x.size()), std::vector<double>(x.size())};
  const auto keep = [&](Range columns, const std::vector<Number>& sums) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < columns.size(); ++j) {
        const Number& sum = sums[static_cast<std::size_t>(t * columns.size() + j)];
        const auto at = static_cast<std::size_t>(t * hidden + columns.begin + j);
        result.y[at] = sum.value;
        result.bound[at] = output_bound(dtype, sum);
      }
    }
  };
  for_each_output(spec, source, dtype, input_of(x, tokens, hidden), tokens, options, keep);
  return result;
}

}  // namespace gatefold
