#include "layers/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "layers/model_families.h"
#include "runtime/error.h"
#include "runtime/json_file.h"
#include "runtime/range.h"

namespace gatefold {
namespace {

using Json = nlohmann::json;
using Overrides = std::vector<std::pair<std::string, std::string>>;

// Of a width or a vocabulary: thousands of times what anybody has.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
constexpr std::int64_t kMaxLayers = 100000;
constexpr double kMaxBytes = 0x1p62;
// Nesting is bounded, so that nothing later can recurse without end.
constexpr JsonRules kConfigRules{.max_bytes = std::uint64_t{16} << 20,
                                 .max_depth = 64,
                                 .kind = "a config.json",
                                 .remedy = "check the file"};
constexpr const char* kChooseDense = "choose a dense model";

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

// A value as it reads in the file, on one line and short enough for a message.
std::string shown(const Json& value) {
  constexpr std::size_t kMaxShown = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

template <typename Strings>
std::string joined(const Strings& strings) {
  std::string text;
  for (const auto& string : strings) text.append(text.empty() ? "" : ", ").append(string);
  return text;
}

// "[48,80]"
std::string shown(const std::vector<std::int64_t>& shape) { return shown(Json(shape)); }

// A config.json with its overrides: where each field lies, and who is to blame for a bad value.
class ConfigDocument {
 public:
  ConfigDocument(const std::string& path, const Overrides& overrides);

  const std::string& model_type() const { return model_type_; }
  const ModelFamily& family() const { return *family_; }
  std::string text() const { return root_.dump(2, ' ', false, Json::error_handler_t::replace); }

  std::int64_t size(std::string_view key, std::int64_t limit, std::int64_t otherwise) const;
  bool flag(const FamilySwitch& rule) const;
  float positive_number(std::string_view key, float otherwise) const;
  std::string string(std::string_view key, std::string_view otherwise) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  bool overridden(std::string_view key) const { return overridden_.contains(key); }
  DType dtype() const;
  void refuse_experts() const;

  // Throws for the field `key`: 64 where --set gave it, else 65.
  [[noreturn]] void fail(std::string_view key, const std::string& problem,
                         const std::string& advice = "") const;

 private:
  Json& text_object() { return nested_ ? root_.at("text_config") : root_; }
  const Json& text_object() const { return nested_ ? root_.at("text_config") : root_; }
  const Json* find(std::string_view key) const;
  void choose_family();
  void apply(const std::string& key, const std::string& value);
  std::vector<std::string_view> keys_read() const;

  std::string path_;
  Json root_;
  bool nested_ = false;
  std::set<std::string, std::less<>> overridden_;
  std::string model_type_;
  const ModelFamily* family_ = nullptr;
};

ConfigDocument::ConfigDocument(const std::string& path, const Overrides& overrides) : path_(path) {
  root_ = Json::parse(read_json_text(path, kConfigRules));
  if (!root_.is_object()) {
    throw Error(ExitCode::kData,
                fmt::format("{}: the top level is {} {} (a config.json holds an object); check the "
                            "file",
                            path, root_.type_name(), shown(root_)));
  }
  const auto inner = root_.find("text_config");
  nested_ = inner != root_.end() && !inner->is_null();
  if (nested_ && !inner->is_object()) {
    fail("text_config", fmt::format("text_config is {} (not an object)", shown(*inner)),
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

// null counts as absent, as everywhere in Hugging Face configs.
const Json* ConfigDocument::find(std::string_view key) const {
  const auto field = text_object().find(key);
  return field == text_object().end() || field->is_null() ? nullptr : &*field;
}

void ConfigDocument::choose_family() {
  model_type_ = string("model_type", "");
  if (model_type_.empty() && nested_ && root_.contains("model_type")) {
    const Json& outer = root_["model_type"];
    if (!outer.is_string()) {
      fail("model_type", fmt::format("model_type is {} (not a string)", shown(outer)));
    }
    model_type_ = outer.get<std::string>();
  }
  if (is_moe_model_type(model_type_)) {
    fail("model_type",
         fmt::format("model_type \"{}\" is a mixture of experts (dense layers only so far)",
                     model_type_),
         kChooseDense);
  }
  family_ = find_family(model_type_);
  if (family_ == nullptr) refuse_experts();
  if (model_type_.empty()) {
    fail("model_type", fmt::format("no model_type (it names the layout of the weights; known: {})",
                                   known_model_types()));
  }
  if (family_ == nullptr) {
    fail("model_type", fmt::format("unknown model_type {} (known: {})", shown(Json(model_type_)),
                                   known_model_types()));
  }
}

void ConfigDocument::apply(const std::string& key, const std::string& value) {
  const std::vector<std::string_view> keys = keys_read();
  if (std::ranges::find(keys, key) == keys.end()) {
    throw Error(ExitCode::kUsage,
                fmt::format("--set {}={}: no such field of {} models (it would have no effect); "
                            "leave it out, or set one of {}",
                            key, value, model_type_, joined(keys)));
  }
  text_object()[key] = parsed_value(value);
  // One field with two spellings: what the user says must win over either.
  if (key == "torch_dtype") text_object().erase("dtype");
  overridden_.insert(key);
}

std::vector<std::string_view> ConfigDocument::keys_read() const {
  std::vector<std::string_view> keys = {"model_type", "vocab_size", "dtype", "torch_dtype"};
  if (family_ == nullptr) return keys;
  const ModelFamily& family = *family_;
  for (const std::string_view key :
       {family.hidden_size_key, family.intermediate_size_key, family.num_layers_key,
        family.activation_key, family.gated.key, family.bias.key, family.swish_beta.key,
        family.clamp_limit_key, family.clamp_alpha_key}) {
    if (!key.empty()) keys.push_back(key);
  }
  for (const auto& more : {family.whole_model_keys, expert_count_keys()}) {
    keys.insert(keys.end(), more.begin(), more.end());
  }
  return keys;
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

// A positive integer up to `limit`; `otherwise` where absent, an error where that is 0.
std::int64_t ConfigDocument::size(std::string_view key, std::int64_t limit,
                                  std::int64_t otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) {
    if (otherwise != 0) return otherwise;
    fail(key, fmt::format("no {} ({} layers can't be sized without it)", key, model_type_));
  }
  if (!value->is_number_integer()) {
    fail(key, fmt::format("{} is {} (not an integer)", key, shown(*value)));
  }
  const bool huge = value->is_number_unsigned() &&
                    value->get<std::uint64_t>() > static_cast<std::uint64_t>(limit);
  if (huge) {
    fail(key, fmt::format("{} is {} (absurd: more than {})", key, shown(*value), limit));
  }
  const auto number = value->get<std::int64_t>();
  if (number <= 0) fail(key, fmt::format("{} is {} (must be positive)", key, number));
  return number;
}

bool ConfigDocument::flag(const FamilySwitch& rule) const {
  const Json* value = rule.key.empty() ? nullptr : find(rule.key);
  if (value == nullptr) return rule.otherwise;
  if (!value->is_boolean()) {
    fail(rule.key, fmt::format("{} is {} (not true or false)", rule.key, shown(*value)));
  }
  return value->get<bool>();
}

float ConfigDocument::positive_number(std::string_view key, float otherwise) const {
  const Json* value = key.empty() ? nullptr : find(key);
  if (value == nullptr) return otherwise;
  using Limits = std::numeric_limits<float>;
  const double number = value->is_number() ? value->get<double>() : 0.0;
  if (!(number >= Limits::min() && number <= Limits::max())) {
    fail(key, fmt::format("{} is {} (not a positive number)", key, shown(*value)));
  }
  return static_cast<float>(number);
}

std::string ConfigDocument::string(std::string_view key, std::string_view otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return std::string(otherwise);
  if (!value->is_string()) {
    fail(key, fmt::format("{} is {} (not a string)", key, shown(*value)));
  }
  return value->get<std::string>();
}

// v5 of transformers writes dtype, v4 torch_dtype; a nested config may keep it at the top.
DType ConfigDocument::dtype() const {
  const Json* value = nullptr;
  std::string_view key;
  for (const Json* object : {&text_object(), &root_}) {
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
  fail(key, fmt::format("{} is {} (known: float32, bfloat16, float16)", key, shown(*value)));
}

void ConfigDocument::refuse_experts() const {
  for (const std::string_view key : expert_count_keys()) {
    const Json* value = find(key);
    if (value == nullptr) continue;
    if (!value->is_number()) {
      fail(key, fmt::format("{} is {} (not an integer)", key, shown(*value)));
    }
    if (value->get<double>() > 0) {
      fail(key,
           fmt::format("{} is {} (a mixture of experts: dense layers only so far)", key,
                       shown(*value)),
           kChooseDense);
    }
  }
}

std::int64_t read_intermediate_size(const ConfigDocument& document, std::int64_t hidden,
                                    bool gated) {
  std::int64_t otherwise = 0;
  switch (document.family().intermediate_default) {
    case IntermediateDefault::kRequired: break;
    case IntermediateDefault::kFourTimesHidden: otherwise = 4 * hidden; break;
    case IntermediateDefault::kLadder:
      otherwise = gated ? round_up(ceil_div(8 * hidden, 3), 8) : 4 * hidden;
      break;
  }
  return document.size(document.family().intermediate_size_key, kMaxSize, otherwise);
}

ActivationKind activation_kind(const ConfigDocument& document, std::string_view key,
                               const std::string& name) {
  const std::optional<ActivationKind> kind = activation_from_name(name);
  if (!kind) {
    document.fail(
        key, fmt::format("unknown {} {} (known: {})", key, shown(Json(name)), activation_names()));
  }
  return *kind;
}

// What another family's field, or an older one, may say is this family's default, whose tanh form
// was once called "gelu". Anything else would be read one way here and ignored elsewhere.
void check_legacy_activation(const ConfigDocument& document) {
  const ModelFamily& family = document.family();
  const std::string_view key = family.legacy_activation_key;
  if (key.empty() || !document.has(key) || document.has(family.activation_key)) return;
  const std::string name = document.string(key, "");
  const std::string standard(family.default_activation);
  const ActivationKind kind = activation_kind(document, key, standard);
  const bool old_tanh = name == "gelu" && kind == ActivationKind::kGeluTanh;
  if (old_tanh || activation_kind(document, key, name) == kind) return;
  document.fail(key,
                fmt::format("{} is \"{}\" without {} ({} layers read the latter, and use {} "
                            "where it is absent)",
                            key, name, family.activation_key, document.model_type(), standard),
                fmt::format("write {} in the file, or --set {}={}", family.activation_key,
                            family.activation_key, name));
}

// A clamp that the activation doesn't have would be dropped in silence.
void refuse_clamps(const ConfigDocument& document, const std::string& activation) {
  for (const auto key : {document.family().clamp_limit_key, document.family().clamp_alpha_key}) {
    if (key.empty() || !document.has(key)) continue;
    document.fail(key,
                  fmt::format("{} is there with {} \"{}\" (only clamped_swiglu has it)", key,
                              document.family().activation_key, activation),
                  "leave one out");
  }
}

Activation read_activation(const ConfigDocument& document, bool gated) {
  const std::string_view key = document.family().activation_key;
  check_legacy_activation(document);
  const std::string name = document.string(key, document.family().default_activation);
  Activation activation{.kind = activation_kind(document, key, name), .gated = gated};
  if (activation.kind != ActivationKind::kClampedSwiglu) {
    refuse_clamps(document, name);
    return activation;
  }
  if (!gated) {
    document.fail(key, fmt::format("{} is \"{}\" in a layer without a gate (it clamps gate and up)",
                                   key, name));
  }
  activation.limit = document.positive_number(document.family().clamp_limit_key, activation.limit);
  activation.alpha = document.positive_number(document.family().clamp_alpha_key, activation.alpha);
  return activation;
}

// Everything later may count elements and bytes in 64 bits without a thought.
void check_total(const ConfigDocument& document, const ModelConfig& config) {
  const double hidden = static_cast<double>(config.hidden_size);
  const double layers = 3.0 * hidden * static_cast<double>(config.intermediate_size) *
                        static_cast<double>(config.num_layers);
  const double embeddings = 2.0 * hidden * static_cast<double>(config.vocab_size);
  if (4.0 * (layers + embeddings) < kMaxBytes) return;
  const ModelFamily& family = document.family();
  constexpr std::string_view kVocabulary = "vocab_size";
  std::string_view blamed = embeddings > layers ? kVocabulary : family.intermediate_size_key;
  for (const std::string_view key : {family.hidden_size_key, family.num_layers_key, kVocabulary}) {
    if (document.overridden(key)) blamed = key;
  }
  document.fail(
      blamed, fmt::format("{} {} with {} {}, {} {} and {} {} is absurd (the weights alone pass "
                          "2^62 bytes)",
                          family.hidden_size_key, config.hidden_size, family.intermediate_size_key,
                          config.intermediate_size, family.num_layers_key, config.num_layers,
                          kVocabulary, config.vocab_size));
}

std::vector<std::string> weight_names(const FfnSpec& spec) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : stored_tensors(spec)) {
    if (tensor.role == TensorRole::kWeight) names.push_back(tensor.name);
  }
  return names;
}

// The first prefix under which any of the layer's weights lies: so one lost weight is named as it
// should be spelled.
std::string_view find_prefix(const ModelConfig& config, std::int64_t layer,
                             const TensorSource& source) {
  std::vector<std::string> looked_for;
  for (const std::string_view prefix : family_of(config).prefixes) {
    const FfnSpec spec = layer_under_prefix(config, layer, prefix);
    for (const std::string& name : weight_names(spec)) {
      if (source.find(name)) return prefix;
    }
    looked_for.push_back(spec.up.name);
  }
  throw Error(ExitCode::kData,
              fmt::format("layer {} of {} has no feed-forward weights (looked for {}); check that "
                          "model_type \"{}\" and the number of layers are those of the weights",
                          layer, source.description(), joined(looked_for), config.model_type));
}

// The field that decides about a tensor, to set or to unset: "--set mlp_bias=true".
std::string switch_advice(const ModelConfig& config, const FamilySwitch& rule, bool value) {
  if (rule.key.empty()) {
    return fmt::format("check that model_type \"{}\" is right", config.model_type);
  }
  return fmt::format("correct the config, or --set {}={}", rule.key, value);
}

const FamilySwitch& switch_of(const ModelFamily& family, TensorRole role) {
  switch (role) {
    case TensorRole::kBias: return family.bias;
    case TensorRole::kSwishBeta: return family.swish_beta;
    case TensorRole::kWeight: break;
  }
  return kAlways;
}

void check_tensor(const ModelConfig& config, const StoredTensor& expected,
                  const TensorSource& source, bool transposed) {
  const std::optional<TensorInfo> found = source.find(expected.name);
  if (!found) {
    const FamilySwitch& rule = switch_of(family_of(config), expected.role);
    throw Error(ExitCode::kData,
                fmt::format("{}: no tensor {} (a {} layer needs it, shape {}); {}",
                            source.description(), expected.name, config.model_type,
                            shown(expected.shape), switch_advice(config, rule, false)));
  }
  if (found->shape == expected.shape) return;
  const bool scalar = expected.role == TensorRole::kSwishBeta;
  if (scalar && found->shape == std::vector<std::int64_t>{1}) return;
  throw Error(
      ExitCode::kData,
      fmt::format("{}: {} has shape {} (expected {}{} for {}'s sizes); correct the "
                  "config or the weights",
                  source.description(), expected.name, shown(found->shape), shown(expected.shape),
                  scalar ? " or [1]" : (transposed ? ", stored [in, out]," : ""), config.path));
}

// One tensor under two names is two models in one: taking either would be a silent choice.
void refuse_other_spelling(const FfnSpec& spec, std::string_view prefix, std::string_view other,
                           const TensorSource& source) {
  for (const StoredTensor& tensor : stored_tensors(spec)) {
    const std::string name = std::string(other) + tensor.name.substr(prefix.size());
    if (name == tensor.name || !source.find(name)) continue;
    throw Error(ExitCode::kData,
                fmt::format("{} holds both {} and {} (two spellings of one tensor: which one "
                            "counts isn't said); take one away",
                            source.description(), tensor.name, name));
  }
}

void refuse_tensor(const ModelConfig& config, const std::string& name, const FamilySwitch& rule,
                   const TensorSource& source) {
  const std::optional<TensorInfo> found = source.find(name);
  if (!found) return;
  const std::string denier = rule.key.empty()
                                 ? fmt::format("{} layers have none", config.model_type)
                                 : fmt::format("{} is false in {}", rule.key, config.path);
  throw Error(ExitCode::kData,
              fmt::format("{} holds {} of shape {} ({}, and dropping it would change the "
                          "answer); {}",
                          source.description(), name, shown(found->shape), denier,
                          switch_advice(config, rule, true)));
}

// What the config denies must not lie in the source: ignoring it would give a wrong answer.
void refuse_denied(const ModelConfig& config, std::int64_t layer, std::string_view prefix,
                   const TensorSource& source) {
  const ModelFamily& family = family_of(config);
  if (!config.bias) {
    for (const std::string_view module : {family.gate, family.up, family.down}) {
      if (module.empty()) continue;
      refuse_tensor(config, layer_name(prefix, module, layer) + ".bias", family.bias, source);
    }
  }
  if (!config.activation.gated && !family.gate.empty()) {
    for (const char* suffix : {".weight", ".bias"}) {
      refuse_tensor(config, layer_name(prefix, family.gate, layer) + suffix, family.gated, source);
    }
  }
  if (!config.swish_beta && !family.beta.empty()) {
    refuse_tensor(config, layer_name(prefix, family.beta, layer), family.swish_beta, source);
  }
}

}  // namespace

FfnSpec ModelConfig::layer_spec(std::int64_t layer) const {
  return layer_under_prefix(*this, layer, family_of(*this).prefixes.front());
}

ModelConfig read_model_config(const std::string& path, const Overrides& overrides) {
  const ConfigDocument document(path, overrides);
  document.refuse_experts();
  const ModelFamily& family = document.family();
  const bool gated = document.flag(family.gated);

  ModelConfig config;
  config.path = path;
  config.model_type = document.model_type();
  config.hidden_size = document.size(family.hidden_size_key, kMaxSize, 0);
  config.intermediate_size = read_intermediate_size(document, config.hidden_size, gated);
  config.num_layers = document.size(family.num_layers_key, kMaxLayers, family.default_num_layers);
  if (document.has("vocab_size")) config.vocab_size = document.size("vocab_size", kMaxSize, 0);
  check_total(document, config);
  config.dtype = document.dtype();
  config.activation = read_activation(document, gated);
  config.bias = document.flag(family.bias);
  config.swish_beta = document.flag(family.swish_beta);
  if (config.swish_beta && config.activation.kind != ActivationKind::kSilu) {
    document.fail(family.swish_beta.key,
                  fmt::format("{} is true but {} isn't silu (beta scales silu's input only)",
                              family.swish_beta.key, family.activation_key));
  }
  config.canonical_text = document.text();
  return config;
}

FfnSpec resolve_layer(const ModelConfig& config, std::int64_t layer, const TensorSource& source) {
  const std::string_view prefix = find_prefix(config, layer, source);
  const FfnSpec spec = layer_under_prefix(config, layer, prefix);
  for (const StoredTensor& tensor : stored_tensors(spec)) {
    check_tensor(config, tensor, source, spec.up.transposed);
  }
  for (const std::string_view any : family_of(config).prefixes) {
    refuse_other_spelling(spec, prefix, any, source);
    refuse_denied(config, layer, any, source);
  }
  return spec;
}

}  // namespace gatefold
