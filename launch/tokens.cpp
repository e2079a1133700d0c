#include "launch/tokens.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <ranges>
#include <span>

#include "layers/seeded_source.h"
#include "runtime/error.h"
#include "runtime/tensor_source.h"

namespace gatefold {
namespace {

/// Of fp32 tokens in memory at a time, but at least one row.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 20;

constexpr const char* kIds = "topk_ids";
constexpr const char* kWeights = "topk_weights";

/// Elements of [T, k], as they are stored.
template <typename Element>
std::vector<Element> read_all(const SafetensorsFile& file, const char* name, std::int64_t count) {
  std::vector<Element> values(static_cast<std::size_t>(count));
  file.read(name, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace

std::vector<float> TokenBatch::as_float(Range rows) const {
  std::vector<float> values(static_cast<std::size_t>(rows.size() * hidden));
  convert(dtype, row(rows.begin), DType::kF32, reinterpret_cast<std::byte*>(values.data()),
          rows.size() * hidden);
  return values;
}

// A piece at a time, so that fp32 values of all of it never exist.
void make_tokens(std::uint64_t seed, TokenBatch& batch) {
  const std::int64_t step = std::max<std::int64_t>(1, kPieceElements / batch.hidden);
  std::vector<float> values;
  for (std::int64_t first = 0; first < batch.tokens; first += step) {
    const Range rows{first, std::min(first + step, batch.tokens)};
    values.resize(static_cast<std::size_t>(rows.size() * batch.hidden));
    seeded_tokens(seed, rows, batch.hidden, batch.dtype, values.data());
    convert(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), batch.dtype,
            batch.x.data() + first * batch.row_bytes(), rows.size() * batch.hidden);
  }
}

void find_nan_rows(TokenBatch& batch) {
  for (std::int64_t t = 0; t < batch.tokens; ++t) {
    const std::vector<float> row = batch.as_float({t, t + 1});
    if (std::any_of(row.begin(), row.end(), [](float v) { return std::isnan(v); })) {
      batch.nan_rows.push_back(t);
    }
  }
}

TokenFile::TokenFile(const std::string& path, std::int64_t hidden) : file_(path) {
  const auto found = file_.header().tensors.find("x");
  if (found == file_.header().tensors.end()) {
    throw Error(
        ExitCode::kData,
        fmt::format("{}: no tensor x (the input tokens have that name); it has: {}", path,
                    fmt::join(file_.header().tensors |
                                  std::views::transform([](const auto& t) { return t.first; }),
                              ", ")));
  }
  const SafetensorsEntry& entry = found->second;
  const auto stored = dtype_from_safetensors(entry.dtype);
  const bool rank_fits = entry.shape.size() == 2 || entry.shape.size() == 3;
  if (!stored || !rank_fits || entry.shape.back() != hidden) {
    throw Error(ExitCode::kData,
                fmt::format("{}: x is {} [{}] (tokens must be F32, BF16 or F16 of shape [T, {}] or "
                            "[B, S, {}], the model's hidden size); write it so",
                            path, entry.dtype, fmt::join(entry.shape, ", "), hidden, hidden));
  }
  stored_ = *stored;
  shape_ = entry.shape;
  tokens_ = std::accumulate(shape_.begin(), shape_.end() - 1, std::int64_t{1}, std::multiplies<>());
  if (tokens_ > 0) return;
  throw Error(ExitCode::kData, fmt::format("{}: x of shape [{}] holds no tokens (there is "
                                           "nothing to compute); give it at least one",
                                           path, fmt::join(shape_, ", ")));
}

void TokenFile::check_sequences(const std::string& path, std::int64_t given) const {
  if (given == 0 || shape_.size() != 3 || shape_[1] == given) return;
  throw Error(ExitCode::kUsage,
              fmt::format("--sequence-length {} and {} disagree (its x of shape [{}] has "
                          "sequences of {} tokens); leave the option out",
                          given, path, fmt::join(shape_, ", "), shape_[1]));
}

void TokenFile::read(TokenBatch& batch) const {
  if (tokens_ != batch.tokens) {
    throw Error(ExitCode::kData, fmt::format("{}: {} tokens instead of {} (the file has changed "
                                             "meanwhile); start again",
                                             batch.description, tokens_, batch.tokens));
  }
  const std::int64_t n = tokens_ * batch.hidden;
  std::vector<std::byte> raw(static_cast<std::size_t>(n * size_of(stored_)));
  file_.read("x", 0, raw);
  convert(stored_, raw.data(), batch.dtype, batch.x.data(), n);
}

Choices TokenFile::routing(const RouteRule& rule) const {
  const auto& tensors = file_.header().tensors;
  const auto ids = tensors.find(kIds);
  const auto weights = tensors.find(kWeights);
  Choices given;
  if (ids == tensors.end() && weights == tensors.end()) return given;
  const std::vector<std::int64_t> shape{tokens_, rule.top_k};
  const auto check = [&](const auto& found, const char* name, const char* types, bool type_fits) {
    if (found != tensors.end() && type_fits && found->second.shape == shape) return;
    throw Error(
        ExitCode::kData,
        fmt::format("{}: {} is {} (a routing of this layer has both {} and {}, {} of shape [{}]); "
                    "correct it, or leave both out",
                    file_.path(), name,
                    found == tensors.end() ? std::string("missing")
                                           : fmt::format("{} [{}]", found->second.dtype,
                                                         fmt::join(found->second.shape, ", ")),
                    kIds, kWeights, types, fmt::join(shape, ", ")));
  };
  const auto type = [&](const auto& found) {
    return found == tensors.end() ? std::string() : found->second.dtype;
  };
  check(ids, kIds, "I32 or I64", type(ids) == "I32" || type(ids) == "I64");
  check(weights, kWeights, "F32", type(weights) == "F32");
  given.resize(tokens_, rule.top_k);
  const std::int64_t count = tokens_ * rule.top_k;
  given.weights = read_all<float>(file_, kWeights, count);
  if (type(ids) == "I32") {
    given.ids = read_all<std::int32_t>(file_, kIds, count);
    return given;
  }
  const auto wide = read_all<std::int64_t>(file_, kIds, count);
  // What doesn't fit is no expert's number, and refused as such.
  std::ranges::transform(wide, given.ids.begin(), [](std::int64_t id) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(id, -1, kMaxExperts));
  });
  return given;
}

}  // namespace gatefold
