#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "layers/balance_terms.h"
#include "layers/family_switch.h"
#include "layers/moe_spec.h"
#include "runtime/routing.h"

namespace gatefold {

/// How the matrices of E experts are stored. Keyed on the family and on which names are there, and
/// on shapes only where a family has two layouts under the same names (Qwen3-VL): [2I, H] and [I,
/// H] can't both be their own transposes.
enum class ExpertLayout {
  kPerExpert,           // gate [I, H], up [I, H], down [H, I]: tensors of their own
  kStacked,             // [E, 2I, H], each expert's gate rows before its up rows; [E, H, I]
  kStackedTransposed,   // [E, H, 2I], gate columns before up columns; [E, I, H]
  kStackedAlternating,  // [E, H, 2I], gate and up columns in turn; [E, I, H]
};

/// One spelling of a mixture's tensors. Module names are those within the layer.
struct ExpertNames {
  ExpertLayout layout = ExpertLayout::kPerExpert;
  std::string_view router = "mlp.gate";
  // Per expert, {} stands for its number and `.weight` follows; stacked, these are whole names.
  std::string_view gate = "mlp.experts.{}.gate_proj";
  std::string_view up = "mlp.experts.{}.up_proj";
  std::string_view down = "mlp.experts.{}.down_proj";
};

/// Which layers a step of s makes mixtures, where first_key and the lists don't say otherwise.
enum class EveryStep {
  kFirst,   // layer % s == 0
  kSecond,  // layer % s == 1, and all where s is 1
  kLast,    // (layer + 1) % s == 0
};

/// How experts are limited and chosen: the values of DeepSeek's topk_method.
enum class TopKMethod {
  kGreedy,              // the best of all
  kGroupLimitedGreedy,  // of the groups with the best experts
  kNoAuxTc,             // of the groups with the best pairs, by score plus correction bias
};

/// What the shared experts are.
enum class SharedWidth {
  kNone,             // there is none
  kOfItsOwn,         // one MLP, whose width shared_key says
  kOfItsOwnIfAny,    // the same, or none where that is 0 or not said
  kOneExpert,        // one MLP of an expert's width
  kSeveralExperts,   // shared_key says how many experts' widths: one wide MLP, whose parts add up
  kListOfOneExpert,  // shared_key says how many MLPs of an expert's width, {} in `shared` which
};

/// The modules of a shared expert, behind its own name. Fused: gate and up are one.
struct SharedNames {
  std::string_view gate = ".gate_proj";
  std::string_view up = ".up_proj";
  std::string_view down = ".down_proj";
};

/// The fields that say what training adds to its loss for a router; absent ones add nothing.
struct LossKeys {
  BalanceLoss loss = BalanceLoss::kTransformers;
  std::string_view coefficient = "router_aux_loss_coef";
  FamilySwitch per_sequence = kNever;
  std::string_view z_coefficient = {};
};

inline constexpr LossKeys kDeepSeekLoss{
    BalanceLoss::kMegatron, "aux_loss_alpha", {"seq_aux", true}, {}};

/// What the family table says about a family's mixtures of experts.
struct MoeFamily {
  FamilySwitch enabled = kAlways;  // where it is off all layers are dense
  // Which layers they are; LayerStack names the step's field.
  EveryStep every = EveryStep::kLast;
  std::string_view list_key = {};        // where given, the layers of this list and no others
  std::string_view dense_list_key = {};  // not the layers of this list
  std::string_view first_key = {};       // not the layers before
  std::int64_t default_first = 0;

  // Sizes. One field goes by several names; the first is the family's own.
  std::vector<std::string_view> experts_keys = {"num_experts", "num_local_experts"};
  std::string_view top_k_key = "num_experts_per_tok";
  std::int64_t default_top_k = 0;  // 0: the field is required
  std::string_view intermediate_size_key = "moe_intermediate_size";
  std::string_view otherwise_intermediate_size_key = {};  // in whose place, where that is absent

  // How a token's experts are chosen and weighed.
  Score score = Score::kSoftmax;
  std::string_view score_key = {};
  TopKMethod method = TopKMethod::kGreedy;
  std::string_view method_key = {};
  std::int64_t default_groups = 1;
  std::int64_t default_kept_groups = 1;
  FamilySwitch normalize = kNever;
  bool normalize_one = true;  // a token's only expert, too, which then weighs 1
  float epsilon = 0.0F;
  std::string_view scaling_key = {};
  float default_scaling = 1.0F;
  std::string_view half_margin_key = {};  // of a sparse mixer
  double default_half_margin = 0;
  FamilySwitch router_bias = kNever;
  FamilySwitch expert_bias = kNever;  // of routed experts; ModelFamily::bias is the other MLPs'
  WeightOn weight_on = WeightOn::kOutput;
  std::string_view capacity_key = {};  // rows that an expert takes of a sequence, where asked for
  std::int64_t default_capacity = 0;

  SharedWidth shared_width = SharedWidth::kNone;
  std::string_view shared_key = {};
  std::int64_t default_shared = 0;  // of shared_key
  std::string_view shared = {};     // the module within the layer
  SharedNames shared_names = {};
  std::string_view shared_gate = {};  // empty: it is added as it is

  // Where the experts lie. The first spelling is the canonical one.
  std::vector<ExpertNames> names = {{}};

  LossKeys loss = {};
};

/// Config fields of a family that limits the groups of experts, whatever its method.
inline constexpr std::string_view kGroupsKey = "n_group";
inline constexpr std::string_view kKeptGroupsKey = "topk_group";

}  // namespace gatefold
