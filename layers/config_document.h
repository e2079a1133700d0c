#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layers/model_families.h"
#include "layers/quantization.h"
#include "runtime/dtype.h"

namespace gatefold {

/// Of a width or a vocabulary: thousands of times what anybody has.
inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
inline constexpr std::int64_t kMaxLayers = 100000;

/// A config.json with its overrides: where each field lies, and who is to blame for a bad value.
/// Everything throws as read_model_config says.
class ConfigDocument {
 public:
  using Overrides = std::vector<std::pair<std::string, std::string>>;
  /// `text` is what the file at `path` holds: see read().
  ConfigDocument(const std::string& text, const std::string& path, const Overrides& overrides);
  static std::string read(const std::string& path);
  ~ConfigDocument();

  const std::string& model_type() const { return model_type_; }
  const ModelFamily& family() const { return *family_; }
  std::string text() const;

  bool has(std::string_view key) const;
  bool overridden(std::string_view key) const { return overridden_.contains(key); }
  /// The first of one field's names that --set gave, else that is there, else the first.
  std::string_view first_of(const std::vector<std::string_view>& keys) const;

  /// A positive integer up to `limit`; `otherwise` where absent, an error where that is 0.
  std::int64_t size(std::string_view key, std::int64_t limit, std::int64_t otherwise) const;
  /// The same, but 0 will do.
  std::int64_t count(std::string_view key, std::int64_t limit, std::int64_t otherwise) const;
  bool flag(const FamilySwitch& rule) const;
  float positive_number(std::string_view key, float otherwise) const;
  /// From 0 to 1.
  double coefficient(std::string_view key, double otherwise = 0) const;
  std::string string(std::string_view key, std::string_view otherwise) const;
  /// Layer numbers below `limit`, in any order.
  std::vector<std::int64_t> layers(std::string_view key, std::int64_t limit) const;
  DType dtype() const;
  std::optional<Quantization> quantization() const;
  void refuse_experts() const;

  /// Throws for the field `key`: 64 where --set gave it, else 65.
  [[noreturn]] void fail(std::string_view key, const std::string& problem,
                         const std::string& advice = "") const;
  /// The same for fields that don't fit together: the first that --set gave is to blame.
  [[noreturn]] void fail(std::initializer_list<std::string_view> keys,
                         const std::string& problem) const;

 private:
  struct Fields;  // the JSON

  const Fields& fields() const { return *fields_; }
  std::int64_t integer(std::string_view key, std::int64_t limit) const;
  void choose_family();
  void choose_older_family();
  void apply(const std::string& key, const std::string& value);
  std::vector<std::string_view> keys_read() const;

  std::string path_;
  std::unique_ptr<Fields> fields_;
  std::set<std::string, std::less<>> overridden_;
  std::string model_type_;
  const ModelFamily* family_ = nullptr;
};

/// A string as it reads in the file, on one line and short enough for a message.
std::string shown(const std::string& text);

}  // namespace gatefold
