"""Mixture-of-experts families of make_golden.py: how they are built, filled, run and recomputed."""
import math

import numpy as np
import torch
import transformers as tf

SEED = 20300
TOKENS, HIDDEN, INTER, SHARED, DENSE = 16, 72, 32, 40, 48
GAP = 1e-3  # between what is chosen and what isn't: experts' scores and groups'

IDS = dict(vocab_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True)
TEXT = dict(hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=64,
            **IDS)
LINEAR = dict(head_dim=8, linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=1,
              linear_num_value_heads=2)
GRANITE = dict({key: value for key, value in TEXT.items() if key != "head_dim"}, residual_multiplier=0.22)
MLA = dict({key: value for key, value in TEXT.items() if key != "head_dim"}, num_key_value_heads=2, q_lora_rank=8,
           kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)


def qwen3_moe():
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(
        **TEXT, num_hidden_layers=2, intermediate_size=DENSE, moe_intermediate_size=INTER, num_experts=5,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[]))


def qwen3_5_moe():
    """The text model sits inside the vision-language model, as in the published checkpoints."""
    text = dict(TEXT, **{**LINEAR}, num_hidden_layers=1, layer_types=["full_attention"], moe_intermediate_size=INTER,
                shared_expert_intermediate_size=SHARED, num_experts=4, num_experts_per_tok=2,
                rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25,
                                     mrope_interleaved=True, mrope_section=[1, 0, 0]))
    vision = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=12, out_hidden_size=HIDDEN, patch_size=2,
                  spatial_merge_size=1, temporal_patch_size=1, num_position_embeddings=4)
    return tf.Qwen3_5MoeForConditionalGeneration(tf.Qwen3_5MoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=3, video_token_id=4,
        vision_start_token_id=5, vision_end_token_id=6))


def qwen3_vl_moe():
    text = dict(TEXT, num_hidden_layers=2, intermediate_size=DENSE, moe_intermediate_size=INTER, num_experts=4,
                num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[1],
                rope_parameters=dict(rope_type="default", rope_theta=5000000.0, mrope_interleaved=True,
                                     mrope_section=[1, 1, 0]))
    vision = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=12, out_hidden_size=HIDDEN, patch_size=2,
                  spatial_merge_size=1, temporal_patch_size=1, num_position_embeddings=4, deepstack_visual_indexes=[0])
    return tf.Qwen3VLMoeForConditionalGeneration(tf.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=3, video_token_id=4,
        vision_start_token_id=5, vision_end_token_id=6))


def deepseek(layers, shared, **more):
    """The formulas of DeepSeek-MoE-16B, whose code isn't in transformers, and of minimind's older one."""
    return tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(
        **MLA, num_hidden_layers=layers, intermediate_size=DENSE, moe_intermediate_size=INTER, n_routed_experts=5,
        num_experts_per_tok=2, n_shared_experts=shared, topk_method="greedy", n_group=1, topk_group=1,
        routed_scaling_factor=1.0, norm_topk_prob=False, **more))


class WithShared(torch.nn.Module):
    """Granite's experts and shared expert, which the layer adds up by itself."""

    def __init__(self, layer):
        super().__init__()
        self.router, self.experts = layer.block_sparse_moe.router, layer.block_sparse_moe.experts
        self.shared_mlp = layer.shared_mlp
        self.routed = (layer.block_sparse_moe,)  # not a module of its own: its parameters are there

    def forward(self, x):
        return self.routed[0](x) + self.shared_mlp(x)


def llama4():
    text = dict(TEXT, num_hidden_layers=2, intermediate_size=INTER, intermediate_size_mlp=DENSE, num_local_experts=4,
                num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=8)
    vision = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, patch_size=2,
                  image_size=4, vision_output_dim=8, projector_input_dim=8, projector_output_dim=8)
    return tf.Llama4ForConditionalGeneration(tf.Llama4Config(
        text_config=text, vision_config=vision, tie_word_embeddings=True, boi_token_index=3, eoi_token_index=4,
        image_token_index=5))


FAMILIES = {
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(
        **TEXT, num_hidden_layers=1, intermediate_size=INTER, num_local_experts=4, num_experts_per_tok=2,
        router_jitter_noise=0.0)),
    "qwen2_moe": lambda: tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(
        **TEXT, num_hidden_layers=2, intermediate_size=DENSE, moe_intermediate_size=INTER,
        shared_expert_intermediate_size=SHARED, num_experts=5, num_experts_per_tok=2, norm_topk_prob=False,
        decoder_sparse_step=1, mlp_only_layers=[1])),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_fused": qwen3_moe,
    "qwen3_next": lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(
        **dict(TEXT, **LINEAR), num_hidden_layers=1, layer_types=["full_attention"], intermediate_size=DENSE,
        moe_intermediate_size=INTER, shared_expert_intermediate_size=SHARED, num_experts=5, num_experts_per_tok=3,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])),
    "qwen3_5_moe": qwen3_5_moe,
    "olmoe": lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(
        **TEXT, num_hidden_layers=1, intermediate_size=INTER, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=False)),
    "deepseek_v2": lambda: tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(
        **MLA, num_hidden_layers=2, intermediate_size=DENSE, moe_intermediate_size=INTER, n_routed_experts=8,
        num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=1, topk_method="group_limited_greedy",
        n_group=4, topk_group=2, routed_scaling_factor=4.0, norm_topk_prob=False)),
    "deepseek_v2_lite": lambda: tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(
        **MLA, num_hidden_layers=1, intermediate_size=DENSE, moe_intermediate_size=INTER, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=0, topk_method="greedy", n_group=1,
        topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False)),
    "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(
        **MLA, num_hidden_layers=2, intermediate_size=DENSE, moe_intermediate_size=INTER, n_routed_experts=8,
        num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True)),
    "glm4_moe": lambda: tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(
        **TEXT, num_hidden_layers=2, intermediate_size=DENSE, moe_intermediate_size=INTER, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        routed_scaling_factor=1.5, norm_topk_prob=True)),
    "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(
        **TEXT, num_hidden_layers=1, layer_types=["full_attention"], intermediate_size=INTER, num_local_experts=4,
        num_experts_per_tok=2)),
    "llama4": llama4,
    "switch_transformers": lambda: tf.SwitchTransformersForConditionalGeneration(tf.SwitchTransformersConfig(
        d_model=HIDDEN, d_kv=4, d_ff=INTER, num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, num_heads=2, num_experts=4, expert_capacity=64, router_bias=False,
        decoder_start_token_id=0, **{key: value for key, value in IDS.items() if key != "bos_token_id"})),
    "qwen3_vl_moe": qwen3_vl_moe,
    "deepseek": lambda: deepseek(2, shared=2, first_k_dense_replace=1),
    "minimind": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(
        **TEXT, num_hidden_layers=1, intermediate_size=INTER, moe_intermediate_size=INTER, num_experts=5,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])),
    "minimind2": lambda: deepseek(1, shared=2, first_k_dense_replace=0),
    "granitemoe": lambda: tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(
        **GRANITE, num_hidden_layers=1, intermediate_size=INTER, num_local_experts=5, num_experts_per_tok=2)),
    "granitemoe_fused": lambda: tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(
        **GRANITE, num_hidden_layers=1, intermediate_size=INTER, num_local_experts=5, num_experts_per_tok=2)),
    "granitemoeshared": lambda: tf.GraniteMoeSharedForCausalLM(tf.GraniteMoeSharedConfig(
        **GRANITE, num_hidden_layers=1, intermediate_size=INTER, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=SHARED)),
    "phimoe": lambda: tf.PhimoeForCausalLM(tf.PhimoeConfig(
        **TEXT, num_hidden_layers=1, intermediate_size=INTER, num_local_experts=8, num_experts_per_tok=2,
        router_jitter_noise=0.25)),
}

F32_TOO = {"mixtral", "gpt_oss"}  # bf16 alone for the others: their goldens are those of fp32 arithmetic anyway
FUSED = {"qwen3_moe_fused", "qwen3_5_moe", "granitemoe_fused"}  # stored as one tensor of all experts


def base(family):
    """Whose formulas and weights it has."""
    return {"qwen3_moe_fused": "qwen3_moe", "granitemoe_fused": "granitemoe", "deepseek_v2_lite": "deepseek_v2"}.get(family, family)


REWRITTEN = {"deepseek", "minimind", "minimind2", "qwen3_vl_moe"}
MODEL_FIELDS = ("architectures", "dtype", "hidden_act", "hidden_size", "intermediate_size", "num_attention_heads",
                "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings",
                "transformers_version", "vocab_size", "norm_topk_prob")
DEEPSEEK_FIELDS = ("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")


def as_published(family, config, tensors):
    """config.json and tensors as those write them whose code transformers doesn't have: the same values."""
    if family == "deepseek":
        config = {key: config[key] for key in MODEL_FIELDS + DEEPSEEK_FIELDS}
        return dict(config, model_type="deepseek", moe_layer_freq=1, scoring_func="softmax"), tensors
    if family == "minimind":
        more = dict(model_type="minimind", use_moe=True, num_experts=config["num_local_experts"],
                    moe_intermediate_size=config["moe_intermediate_size"])
        return dict({key: config[key] for key in MODEL_FIELDS}, **more), tensors
    if family == "minimind2":
        more = dict(model_type="minimind", use_moe=True, scoring_func="softmax", intermediate_size=INTER,
                    n_routed_experts=config["n_routed_experts"], n_shared_experts=config["n_shared_experts"])
        listed = {}
        for name, tensor in tensors.items():
            stem, wide, part = name.partition("shared_experts.")
            if not wide:
                listed[name] = tensor
                continue
            for j, one in enumerate(tensor.split(INTER, dim=1 if part.startswith("down") else 0)):
                listed[f"{stem}shared_experts.{j}.{part}"] = one.contiguous()
        return dict({key: config[key] for key in MODEL_FIELDS}, **more), listed
    if family == "qwen3_vl_moe":  # published [in, out]; transformers reads both, and saves what it has in memory
        return config, {name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor
                        for name, tensor in tensors.items()}
    return config, tensors


def mlps(model):
    """Each layer's feed-forward module; of encoder and decoder, the encoder's first."""
    family = model.config.model_type
    if family == "switch_transformers":
        return [block.layer[-1].mlp for stack in (model.encoder, model.decoder) for block in stack.block]
    if family == "granitemoe":
        return [layer.block_sparse_moe for layer in model.model.layers]
    if family == "granitemoeshared":
        return [WithShared(layer) for layer in model.model.layers]
    if family == "llama4":
        return [layer.feed_forward for layer in model.language_model.model.layers]
    nested = family in ("qwen3_5_moe", "qwen3_vl_moe")
    return [layer.mlp for layer in (model.model.language_model if nested else model.model).layers]


def router(mlp):
    """The module that routes, or None in a dense layer."""
    found = getattr(mlp, "router", None) or getattr(mlp, "gate", None)
    return found if hasattr(mlp, "experts") else None


def reinitialise(model, generator):
    """Spread the weights: routers far from ties, corrections that change choices, y of O(1)."""
    in_first = model.config.model_type in ("gpt_oss", "llama4")  # experts stored [E, in, out]
    clamped = model.config.model_type == "gpt_oss"  # some gates and ups have to pass the limit

    def fill(values, std):
        values.copy_(torch.randn(values.shape, generator=generator) * std)

    for mlp in mlps(model):
        for name, p in mlp.named_parameters():
            if name.endswith("bias"):
                fill(p, 0.5)
            elif name.startswith(("gate.", "router.")) or name == "shared_expert_gate.weight":
                fill(p, 2 / math.sqrt(p.shape[1]))
            else:
                fan_in = p.shape[1 if in_first and name.startswith("experts") else -1]
                std = (0.7 if "down" in name else 3.0) if clamped else 1.5
                fill(p, std / math.sqrt(fan_in))
        for name, b in mlp.named_buffers():
            assert name == "gate.e_score_correction_bias", name
            fill(b, 0.15)


def in_order(family, weights):
    """Where a token's experts go: the heaviest first, but as chosen where each is weighed against what is left."""
    return torch.arange(2).expand_as(weights) if family == "phimoe" else weights.argsort(dim=-1, descending=True)


def forward(model, x):
    """y.N of every layer, and ids.N and weights.N [T, k] of those that are mixtures, in_order."""
    out = {}
    for n, mlp in enumerate(mlps(model)):
        y = mlp(x[None])
        out[f"y.{n}"] = (y[0] if isinstance(y, tuple) else y).reshape(x.shape).contiguous()
        if router(mlp) is None:
            continue
        first, second, *rest = router(mlp)(x[None] if model.config.model_type == "switch_transformers" else x)
        if model.config.model_type == "switch_transformers":
            ids, weights = first[0].argmax(-1, keepdim=True), second[0]
            assert (first.sum(-1) == 1).all()  # no token was over capacity
        elif model.config.model_type == "llama4":
            weights, ids = first.topk(model.config.text_config.num_experts_per_tok, dim=-1)
        else:
            weights, ids = second, rest[0]
        order = in_order(model.config.model_type, weights)
        out[f"ids.{n}"] = ids.gather(-1, order).to(torch.int32).contiguous()
        out[f"weights.{n}"] = weights.gather(-1, order).to(torch.float32).contiguous()
    return out


# ---- the independent check: raw files, numpy, float64 ----

def silu(z):
    return z / (1 + np.exp(-z))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def largest(values, count):
    """(indices of the `count` largest, the gap to the next one)."""
    order = np.argsort(-values, kind="stable")
    gap = values[order[count - 1]] - values[order[count]] if count < len(values) else math.inf
    return order[:count], gap


def get(config, key, default=None):
    text = config.get("text_config", config)
    names = {"num_experts": ("num_experts", "num_local_experts", "n_routed_experts")}.get(key, (key,))
    return next((text[name] for name in names if text.get(name) is not None), default)


def mixed(logits, margin):
    """The same of a sparse mixer: each of two against what is left and near it, whose edge has a gap, too."""
    left, ids, weights, gaps = logits.copy(), [], [], []
    for _ in range(2):
        (best, *_), gap = largest(left, 1)
        distance = (left[best] - left) / np.maximum(np.abs(logits), left[best])
        gaps += [gap, np.abs(distance - margin).min()]
        ids.append(best)
        weights.append(softmax(np.where(distance > margin, -np.inf, left))[best])
        left[best] = -np.inf
    return np.array(ids), np.array(weights), min(gaps)


def route(config, family, logits, correction):
    """(ids, weights, smallest gap) of one token."""
    k, gaps = get(config, "num_experts_per_tok", 1), []
    if family == "phimoe":
        return mixed(logits, 2 * config["router_jitter_noise"])
    if family in ("gpt_oss", "llama4") or family.startswith("granite"):
        ids, gap = largest(logits, k)
        return ids, (sigmoid if family == "llama4" else softmax)(logits[ids]), gap
    v3 = family in ("deepseek_v3", "glm4_moe")
    scores = sigmoid(logits) if v3 else softmax(logits)
    choice = scores + correction
    groups = get(config, "n_group", 1)
    if family.startswith(("deepseek", "glm4")) and groups > 1:
        parts = np.sort(choice.reshape(groups, -1))
        kept, gap = largest(parts[:, -1] + parts[:, -2] if v3 else parts[:, -1], get(config, "topk_group"))
        gaps.append(gap)
        outside = ~np.isin(np.arange(len(choice)) // (len(choice) // groups), kept)
        choice = np.where(outside, -np.inf, choice)
    ids, gap = largest(choice, k)
    weights = scores[ids]
    if family in ("mixtral", "qwen3_5_moe", "qwen3_vl_moe") or get(config, "norm_topk_prob", False):
        weights = weights / weights.sum()
    return ids, weights * get(config, "routed_scaling_factor", 1.0), min([*gaps, gap])


def expert(family, w, p, e):
    """Expert e's feed-forward, as a function."""
    if family == "switch_transformers":
        wi, wo = w[f"{p}experts.expert_{e}.wi.weight"], w[f"{p}experts.expert_{e}.wo.weight"]
        return lambda v: wo @ np.maximum(wi @ v, 0)
    if family == "gpt_oss":
        both, bias = w[p + "experts.gate_up_proj"][e], w[p + "experts.gate_up_proj_bias"][e]
        down, down_bias = w[p + "experts.down_proj"][e], w[p + "experts.down_proj_bias"][e]

        def clamped(v):
            gate, up = (v @ both + bias)[0::2], (v @ both + bias)[1::2]
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return ((up + 1) * gate * sigmoid(1.702 * gate)) @ down + down_bias
        return clamped
    if p + "input_linear.weight" in w:
        (gate, up), down = np.split(w[p + "input_linear.weight"][e], 2), w[p + "output_linear.weight"][e]
    elif p + "experts.gate_up_proj" in w:
        both, down = w[p + "experts.gate_up_proj"][e], w[p + "experts.down_proj"][e]
        if family == "llama4" or (family == "qwen3_vl_moe" and both.shape[0] == HIDDEN):
            both, down = both.T, down.T
        gate, up = np.split(both, 2)
    else:
        names = ("w1", "w3", "w2") if family in ("mixtral", "phimoe") else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (w[f"{p}experts.{e}.{name}.weight"] for name in names)
    return lambda v: down @ (silu(gate @ v) * (up @ v))


def dense(w, p, x):
    return (silu(x @ w[p + "gate_proj.weight"].T) * (x @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T


def prefix(family, config, n):
    if family == "switch_transformers":
        blocks = config["num_layers"]
        return f"encoder.block.{n}.layer.1.mlp." if n < blocks else f"decoder.block.{n - blocks}.layer.2.mlp."
    before = {"qwen3_5_moe": "model.language_model.", "qwen3_vl_moe": "model.language_model.", "llama4": "language_model.model."}.get(family, "model.")
    sparse = dict.fromkeys(("mixtral", "phimoe", "granitemoe", "granitemoeshared"), "block_sparse_moe.")
    block = {**sparse, "llama4": "feed_forward."}.get(family, "mlp.")
    return f"{before}layers.{n}.{block}"


def by_hand(family, config, w, n, x):
    """(y, ids or None, weights, gap of each token) of layer n, a token's experts in_order."""
    p = prefix(family, config, n)
    names = ("router.classifier.weight", "router.layer.weight", "router.weight", "gate.weight")
    gate = next((w[p + name] for name in names if p + name in w), None)
    if gate is None:
        if family == "switch_transformers":
            return np.maximum(x @ w[p + "wi.weight"].T, 0) @ w[p + "wo.weight"].T, None, None, np.full(len(x), math.inf)
        return dense(w, p, x), None, None, np.full(len(x), math.inf)
    correction = w.get(p + "gate.e_score_correction_bias", np.zeros(len(gate)))
    y, all_ids, all_weights, gaps = np.zeros_like(x), [], [], []
    for t, v in enumerate(x):
        ids, weights, gap = route(config, family, gate @ v + w.get(p + "router.bias", 0.0), correction)
        for e, weight in zip(ids, weights):
            f = expert(family, w, p, e)
            y[t] += f(weight * v) if family == "llama4" else weight * f(v)
        order = np.argsort(-weights, kind="stable") if family != "phimoe" else [0, 1]
        all_ids.append(ids[order])
        all_weights.append(weights[order])
        gaps.append(gap)
    for name in ("shared_expert.", "shared_experts.", "shared_experts.0.", "shared_experts.1."):
        if p + name + "up_proj.weight" in w:
            g = w.get(p + "shared_expert_gate.weight")
            y += dense(w, p + name, x) * (1.0 if g is None else sigmoid(x @ g.T))
    shared = p.replace("block_sparse_moe", "shared_mlp")
    if family == "granitemoeshared":
        gate, up = np.split(x @ w[shared + "input_linear.weight"].T, 2, axis=-1)
        y += (silu(gate) * up) @ w[shared + "output_linear.weight"].T
    return y, np.array(all_ids), np.array(all_weights), np.array(gaps)
