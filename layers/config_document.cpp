#include "layers/config_document.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "runtime/json_file.h"

namespace gatefold {
namespace {

using Json = nlohmann::json;

// Nesting is bounded, so that nothing later can recurse without end.
constexpr JsonRules kConfigRules{.max_bytes = std::uint64_t{16} << 20,
                                 .max_depth = 64,
                                 .kind = "a config.json",
                                 .remedy = "check the file"};

// Python writes torch's type names; "float" and "half" are its aliases.
constexpr std::pair<std::string_view, DType> kDTypeNames[] = {{"float32", DType::kF32},
                                                              {"bfloat16", DType::kBf16},
                                                              {"float16", DType::kF16},
                                                              {"float", DType::kF32},
                                                              {"half", DType::kF16}};

// The value of --set: JSON, or else a string as it stands.
Json parsed_value(const std::string& text) {
  try {
    check_json_text(text, "--set", kConfigRules);
  } catch (const Error&) {
    return text;
  }
  return Json::parse(text);
}

void add_moe_keys(const MoeFamily& moe, std::vector<std::string_view>& keys) {
  keys.insert(keys.end(), moe.experts_keys.begin(), moe.experts_keys.end());
  keys.insert(keys.end(),
              {moe.enabled.key, moe.list_key, moe.dense_list_key, moe.first_key, moe.top_k_key,
               moe.intermediate_size_key, moe.otherwise_intermediate_size_key, moe.score_key,
               moe.method_key, moe.normalize.key, moe.scaling_key, moe.half_margin_key,
               moe.router_bias.key, moe.capacity_key, moe.shared_key, moe.loss.coefficient,
               moe.loss.per_sequence.key, moe.loss.z_coefficient});
  if (moe.method == TopKMethod::kGreedy && moe.method_key.empty()) return;
  keys.insert(keys.end(), {kGroupsKey, kKeptGroupsKey});
}

// A value as it reads in the file, on one line and short enough for a message.
std::string shown_value(const Json& value) {
  constexpr std::size_t kMaxShown = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

}  // namespace

struct ConfigDocument::Fields {
  Json root;
  bool nested = false;

  Json& text() { return nested ? root.at("text_config") : root; }
  const Json& text() const { return nested ? root.at("text_config") : root; }
  // null counts as absent, as everywhere in Hugging Face configs.
  const Json* find(std::string_view key) const {
    const auto field = text().find(key);
    return key.empty() || field == text().end() || field->is_null() ? nullptr : &*field;
  }
};

ConfigDocument::~ConfigDocument() = default;

std::string shown(const std::string& text) { return shown_value(text); }

std::string ConfigDocument::text() const {
  return fields().root.dump(2, ' ', false, Json::error_handler_t::replace);
}

bool ConfigDocument::has(std::string_view key) const { return fields().find(key) != nullptr; }

std::string ConfigDocument::read(const std::string& path) {
  return read_json_text(path, kConfigRules);
}

ConfigDocument::ConfigDocument(const std::string& text, const std::string& path,
                               const Overrides& overrides)
    : path_(path), fields_(std::make_unique<Fields>()) {
  Json& root = fields_->root;
  root = Json::parse(text);
  if (!root.is_object()) {
    throw Error(ExitCode::kData,
                fmt::format("{}: the top level is {} {} (a config.json holds an object); check the "
                            "file",
                            path, root.type_name(), shown_value(root)));
  }
  const auto inner = root.find("text_config");
  fields_->nested = inner != root.end() && !inner->is_null();
  if (fields_->nested && !inner->is_object()) {
    fail("text_config", fmt::format("text_config is {} (not an object)", shown_value(*inner)),
         "correct the file");
  }
  // The family decides which keys are known, so its own override comes first.
  for (const auto& [key, value] : overrides) {
    if (key == "model_type") apply(key, value);
  }
  choose_family();
  for (const auto& [key, value] : overrides) {
    if (key == "model_type") continue;
    apply(key, value);
  }
}

void ConfigDocument::choose_family() {
  model_type_ = string("model_type", "");
  if (model_type_.empty() && fields_->nested && fields_->root.contains("model_type")) {
    const Json& outer = fields_->root["model_type"];
    if (!outer.is_string()) {
      fail("model_type", fmt::format("model_type is {} (not a string)", shown_value(outer)));
    }
    model_type_ = outer.get<std::string>();
  }
  family_ = find_family(model_type_);
  if (family_ != nullptr && has(family_->older_key)) choose_older_family();
  if (model_type_.empty()) {
    fail("model_type", fmt::format("no model_type (it names the layout of the weights; known: {})",
                                   known_model_types()));
  }
  if (family_ == nullptr) {
    fail("model_type", fmt::format("unknown model_type {} (known: {})", shown_value(model_type_),
                                   known_model_types()));
  }
}

void ConfigDocument::choose_older_family() {
  for (const std::string_view key : family_->moe->experts_keys) {
    if (!has(key)) continue;
    fail(key,
         fmt::format("both {} and {} are there (an older {} has the latter, and another rule; "
                     "which one it is isn't said)",
                     key, family_->older_key, model_type_),
         fmt::format("leave one out, or write model_type {} for the older", family_->older_type));
  }
  model_type_ = family_->older_type;
  family_ = find_family(model_type_);
}

void ConfigDocument::apply(const std::string& key, const std::string& value) {
  const std::vector<std::string_view> keys = keys_read();
  if (std::ranges::find(keys, key) == keys.end()) {
    throw Error(ExitCode::kUsage,
                fmt::format("--set {}={}: no such field of {} models (it would have no effect); "
                            "leave it out, or set one of {}",
                            key, value, model_type_, fmt::join(keys, ", ")));
  }
  const Json parsed = parsed_value(value);
  if (key == kQuantizationKey) {
    fields_->root.erase(key);  // nested configs have it there
    fields_->text().erase(key);
    if (parsed.is_null()) return;
  }
  fields_->text()[key] = parsed;
  // One field with two spellings: what the user says must win over either.
  if (key == "torch_dtype") fields_->text().erase("dtype");
  overridden_.insert(key);
}

std::vector<std::string_view> ConfigDocument::keys_read() const {
  std::vector<std::string_view> keys = {"model_type", "vocab_size", "dtype", "torch_dtype",
                                        kQuantizationKey};
  if (family_ == nullptr) return keys;
  const ModelFamily& family = *family_;
  keys.insert(keys.end(), {family.hidden_size_key, family.intermediate_size_key,
                           family.activation_key, family.gated.key, family.bias.key,
                           family.swish_beta.key, family.clamp_limit_key, family.clamp_alpha_key});
  for (const LayerStack& stack : family.stacks) {
    keys.insert(keys.end(), {stack.num_layers_key, stack.moe_step_key, stack.moe_count_key});
  }
  const auto& moe_counts = expert_count_keys();
  if (family.moe) {
    add_moe_keys(*family.moe, keys);
  } else {
    keys.insert(keys.end(), moe_counts.begin(), moe_counts.end());
  }
  keys.insert(keys.end(), family.whole_model_keys.begin(), family.whole_model_keys.end());
  std::vector<std::string_view> once;
  for (const std::string_view key : keys) {
    if (!key.empty() && std::ranges::find(once, key) == once.end()) once.push_back(key);
  }
  return once;
}

void ConfigDocument::fail(std::string_view key, const std::string& problem,
                          const std::string& advice) const {
  const bool by_option = overridden(key);
  const std::string usual =
      by_option ? "correct the option" : fmt::format("correct the file or --set {}=VALUE", key);
  throw Error(by_option ? ExitCode::kUsage : ExitCode::kData,
              fmt::format("{}: {}; {}", by_option ? "--set" : path_, problem,
                          advice.empty() ? usual : advice));
}

void ConfigDocument::fail(std::initializer_list<std::string_view> keys,
                          const std::string& problem) const {
  for (const std::string_view key : keys) {
    if (overridden(key)) fail(key, problem);
  }
  fail(*keys.begin(), problem);
}

std::string_view ConfigDocument::first_of(const std::vector<std::string_view>& keys) const {
  for (const std::string_view key : keys) {
    if (overridden(key)) return key;
  }
  for (const std::string_view key : keys) {
    if (has(key)) return key;
  }
  return keys.front();
}

// Of a field that is there.
std::int64_t ConfigDocument::integer(std::string_view key, std::int64_t limit) const {
  const Json& value = *fields().find(key);
  if (!value.is_number_integer()) {
    fail(key, fmt::format("{} is {} (not an integer)", key, shown_value(value)));
  }
  const bool huge =
      value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(limit);
  if (huge) {
    fail(key, fmt::format("{} is {} (absurd: more than {})", key, shown_value(value), limit));
  }
  return value.get<std::int64_t>();
}

std::int64_t ConfigDocument::size(std::string_view key, std::int64_t limit,
                                  std::int64_t otherwise) const {
  if (!has(key)) {
    if (otherwise != 0) return otherwise;
    fail(key, fmt::format("no {} ({} layers can't be sized without it)", key, model_type_));
  }
  const std::int64_t number = integer(key, limit);
  if (number <= 0) fail(key, fmt::format("{} is {} (must be positive)", key, number));
  return number;
}

std::int64_t ConfigDocument::count(std::string_view key, std::int64_t limit,
                                   std::int64_t otherwise) const {
  if (!has(key)) return otherwise;
  const std::int64_t number = integer(key, limit);
  if (number < 0) fail(key, fmt::format("{} is {} (must not be negative)", key, number));
  return number;
}

bool ConfigDocument::flag(const FamilySwitch& rule) const {
  const Json* value = fields().find(rule.key);
  if (value == nullptr) return rule.otherwise;
  if (!value->is_boolean()) {
    fail(rule.key, fmt::format("{} is {} (not true or false)", rule.key, shown_value(*value)));
  }
  return value->get<bool>();
}

float ConfigDocument::positive_number(std::string_view key, float otherwise) const {
  const Json* value = fields().find(key);
  if (value == nullptr) return otherwise;
  using Limits = std::numeric_limits<float>;
  const double number = value->is_number() ? value->get<double>() : 0.0;
  if (!(number >= Limits::min() && number <= Limits::max())) {
    fail(key, fmt::format("{} is {} (not a positive number)", key, shown_value(*value)));
  }
  return static_cast<float>(number);
}

double ConfigDocument::coefficient(std::string_view key, double otherwise) const {
  const Json* value = fields().find(key);
  if (value == nullptr) return otherwise;
  const double number = value->is_number() ? value->get<double>() : -1.0;
  if (number >= 0 && number <= 1) return number;
  fail(key, fmt::format("{} is {} (not a number from 0 to 1)", key, shown_value(*value)));
}

std::string ConfigDocument::string(std::string_view key, std::string_view otherwise) const {
  const Json* value = fields().find(key);
  if (value == nullptr) return std::string(otherwise);
  if (!value->is_string()) {
    fail(key, fmt::format("{} is {} (not a string)", key, shown_value(*value)));
  }
  return value->get<std::string>();
}

std::vector<std::int64_t> ConfigDocument::layers(std::string_view key, std::int64_t limit) const {
  const Json* value = fields().find(key);
  if (value == nullptr) return {};
  if (!value->is_array()) {
    fail(key, fmt::format("{} is {} (not a list of layers)", key, shown_value(*value)));
  }
  std::vector<std::int64_t> list;
  for (const Json& element : *value) {
    if (!element.is_number_unsigned()) {
      fail(key, fmt::format("{} holds {} (not the number of a layer)", key, shown_value(element)));
    }
    // Layers that --set num_hidden_layers took away may still be listed.
    const auto layer = element.get<std::uint64_t>();
    if (layer < static_cast<std::uint64_t>(limit)) list.push_back(static_cast<std::int64_t>(layer));
  }
  return list;
}

// v5 of transformers writes dtype, v4 torch_dtype; a nested config may keep it at the top.
DType ConfigDocument::dtype() const {
  const Json* value = nullptr;
  std::string_view key;
  for (const Json* object : {&fields().text(), &fields().root}) {
    for (const std::string_view candidate : {"dtype", "torch_dtype"}) {
      const auto field = object->find(candidate);
      if (value != nullptr || field == object->end() || field->is_null()) continue;
      value = &*field;
      key = candidate;
    }
  }
  if (value == nullptr) return DType::kF32;
  if (value->is_string()) {
    std::string_view name = value->get_ref<const std::string&>();
    if (name.starts_with("torch.")) name.remove_prefix(6);
    for (const auto& [known_name, dtype] : kDTypeNames) {
      if (name == known_name) return dtype;
    }
  }
  fail(key, fmt::format("{} is {} (known: float32, bfloat16, float16)", key, shown_value(*value)));
}

std::optional<Quantization> ConfigDocument::quantization() const {
  const Json* value = fields().find(kQuantizationKey);
  if (value == nullptr) {
    const auto outer = fields().root.find(kQuantizationKey);
    if (outer == fields().root.end() || outer->is_null()) return std::nullopt;
    value = &*outer;
  }
  const auto refuse = [&](std::string_view part, const Json& found, std::string_view wanted) {
    fail(kQuantizationKey,
         fmt::format("{}{} is {} ({})", kQuantizationKey, part, shown_value(found), wanted));
  };
  if (!value->is_object()) refuse("", *value, "not an object");
  Quantization quantization;
  if (const auto method = value->find("quant_method"); method != value->end()) {
    if (!method->is_string()) refuse(".quant_method", *method, "not a string");
    quantization.method = method->get<std::string>();
  }
  const auto block = value->find("weight_block_size");
  if (quantization.method != "fp8" || block == value->end() || block->is_null()) {
    return quantization;
  }
  const auto side = [](const Json& size) {
    return size.is_number_unsigned() && size > 0 && size <= kMaxSize;
  };
  if (!block->is_array() || block->size() != 2 || !std::ranges::all_of(*block, side)) {
    refuse(".weight_block_size", *block, "not two positive integers");
  }
  quantization.block_rows = block->at(0).get<std::int64_t>();
  quantization.block_columns = block->at(1).get<std::int64_t>();
  return quantization;
}

// A dense family's config with experts is another model's.
void ConfigDocument::refuse_experts() const {
  if (family_->moe) return;
  for (const std::string_view key : expert_count_keys()) {
    const Json* value = fields().find(key);
    if (value == nullptr) continue;
    if (!value->is_number()) {
      fail(key, fmt::format("{} is {} (not an integer)", key, shown_value(*value)));
    }
    if (value->get<double>() > 0) {
      fail(key, fmt::format("{} is {} (a mixture of experts, which {} models are not)", key,
                            shown_value(*value), model_type_));
    }
  }
}

}  // namespace gatefold
