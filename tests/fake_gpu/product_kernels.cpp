// The product's kernels for the stand-in libcudart: every instance that the .cu files of
// runtime/ start. One that is missing here ends its first launch.
#include "runtime/cuda_expert_kernels.cuh"
#include "runtime/cuda_kernels.cuh"

namespace gatefold::cuda {
namespace {

template <auto... kernels>
bool add(const char* name) {
  return (gatefold_fake::register_kernel<kernels>(name) && ...);
}

template <typename... Units>
bool add_copies() {
  return add<&copy_pieces<Units>...>("copy_pieces") &&
         add<&pack_weight_rows<Units>...>("pack_weight_rows") &&
         add<&gather_rows<Units>...>("gather_rows");
}

template <ActivationKind... kinds>
bool add_activations() {
  return add<&activate_tile<kinds, true, DType::kF32>...>("activate_tile") &&
         add<&activate_tile<kinds, true, DType::kBf16>...>("activate_tile") &&
         add<&activate_tile<kinds, true, DType::kF16>...>("activate_tile") &&
         add<&activate_tile<kinds, false, DType::kF32>...>("activate_tile") &&
         add<&activate_tile<kinds, false, DType::kBf16>...>("activate_tile") &&
         add<&activate_tile<kinds, false, DType::kF16>...>("activate_tile");
}

template <DType... dtypes>
bool add_sums() {
  return add<&sum_roots<dtypes, kFewRoots>...>("sum_roots") &&
         add<&sum_roots<dtypes, kMostRoots>...>("sum_roots") &&
         add<&plain_gemm<dtypes>...>("plain_gemm");
}

template <DType... dtypes>
bool add_experts() {
  return add<&scale_rows<dtypes>...>("scale_rows") &&
         add<&combine_rows<dtypes>...>("combine_rows") &&
         add<&router_logits<dtypes, 1, true>...>("router_logits") &&
         add<&router_logits<dtypes, 1, false>...>("router_logits") &&
         add<&router_logits<dtypes, 2, true>...>("router_logits") &&
         add<&router_logits<dtypes, 2, false>...>("router_logits");
}

template <Score... scores>
bool add_choices() {
  return add<&choose_experts<scores>...>("choose_experts") &&
         add<&score_logits<scores>...>("score_logits");
}

[[maybe_unused]] const bool kAdded =
    add_copies<uint4, uint2, unsigned, unsigned short, unsigned char>() &&
    add_activations<ActivationKind::kIdentity, ActivationKind::kRelu, ActivationKind::kRelu2,
                    ActivationKind::kSilu, ActivationKind::kGeluExact, ActivationKind::kGeluTanh,
                    ActivationKind::kQuickGelu, ActivationKind::kClampedSwiglu>() &&
    add_sums<DType::kF32, DType::kBf16, DType::kF16>() &&
    add_experts<DType::kF32, DType::kBf16, DType::kF16>() &&
    add_choices<Score::kSoftmax, Score::kSoftmaxOfChosen, Score::kSigmoid, Score::kSigmoidOfChosen,
                Score::kSqrtSoftplus, Score::kSparseMixer>() &&
    add<&weigh_rows>("weigh_rows") && add<&merge_tile>("merge_tile");

}  // namespace
}  // namespace gatefold::cuda
