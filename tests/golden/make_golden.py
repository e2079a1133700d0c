#!/usr/bin/env python3
"""Make Gatefold's golden FFN values with Hugging Face transformers.

Requirements, as used for the files here (Python 3.11):
    pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy==2.4.6

    python make_golden.py [OUT_DIR] [FAMILY ...]

Every family becomes OUT_DIR/FAMILY/{f32,bf16}/: a small sharded checkpoint with random
weights, and golden.safetensors with x and y.N = MLP of layer N applied to x, in float32.
Mixtures of experts (moe_golden.py) have ids.N and weights.N too.
The written files are then checked twice: reloaded with from_pretrained, and recomputed in
float64 numpy from the raw files with formulas that share nothing with transformers.
"""
import copy
import json
import math
import pathlib
import shutil
import sys

import moe_golden as moe
import numpy as np
import safetensors
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

SEED = 20260
TOKENS, HIDDEN, INTER, LAYERS = 11, 48, 80, 2
TOLERANCE = 1e-5  # of max|y|

# Small vocabulary and heads keep the files small; the FFN sizes are what matters.
IDS = dict(vocab_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True)
TEXT = dict(hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=LAYERS, num_attention_heads=2,
            num_key_value_heads=1, head_dim=4, max_position_embeddings=64, **IDS)


def llama(bias):
    return tf.LlamaForCausalLM(tf.LlamaConfig(mlp_bias=bias, **TEXT))


def qwen3_5():
    """The text model sits inside the vision-language model, as in the published checkpoints."""
    text = dict(TEXT, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=4,
                linear_value_head_dim=4, linear_num_key_heads=1, linear_num_value_heads=2,
                rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25,
                                     mrope_interleaved=True, mrope_section=[1, 0, 0]))
    vision = dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=12, out_hidden_size=HIDDEN, patch_size=2,
                  spatial_merge_size=1, temporal_patch_size=1, num_position_embeddings=4)
    return tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=3, video_token_id=4,
        vision_start_token_id=5, vision_end_token_id=6))


FAMILIES = {
    "llama": lambda: llama(False),
    "llama_bias": lambda: llama(True),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**TEXT)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TEXT)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TEXT)),
    "qwen3_5": qwen3_5,
    "gemma3_text": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(query_pre_attn_scalar=4, **TEXT)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**TEXT)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(
        n_embd=HIDDEN, n_inner=INTER, n_layer=LAYERS, n_head=4, n_positions=16, **IDS)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(
        hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=16, **IDS)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(
        hidden_size=HIDDEN, ffn_dim=INTER, num_hidden_layers=LAYERS, num_attention_heads=4, word_embed_proj_dim=HIDDEN,
        max_position_embeddings=16, **IDS)),
    "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**TEXT)),
}


def mlps(model):
    """The layers' feed-forward modules: (callable, its parameters by name)."""
    family = model.config.model_type
    if family == "bert":  # no single module: up to, not including, the residual and LayerNorm
        for layer in model.bert.encoder.layer:
            yield (lambda x, b=layer: b.output.dense(b.intermediate(x))), [
                *layer.intermediate.dense.named_parameters(), *layer.output.dense.named_parameters()]
        return
    if family == "opt":  # nor here: y is before the residual
        for layer in model.model.decoder.layers:
            yield (lambda x, b=layer: b.fc2(b.activation_fn(b.fc1(x)))), [
                *layer.fc1.named_parameters(), *layer.fc2.named_parameters()]
        return
    base = {"gpt2": lambda: model.transformer.h, "qwen3_5": lambda: model.model.language_model.layers}
    for layer in base.get(family, lambda: model.model.layers)():
        yield layer.mlp, list(layer.mlp.named_parameters())


def reinitialise(model, generator):
    """Spread the FFN weights so that gates open and close and y is O(1); make biases count."""
    conv1d = model.config.model_type == "gpt2"  # stores [in, out]
    for _, parameters in mlps(model):
        for name, p in parameters:
            std = 0.5 if name.endswith("bias") else 1.5 / math.sqrt(p.shape[0 if conv1d else 1])
            p.copy_(torch.randn(p.shape, generator=generator) * std)


def forward(model, x):
    return {f"y.{n}": mlp(x[None])[0].contiguous() for n, (mlp, _) in enumerate(mlps(model))}


def sort_metadata(path):
    """safetensors writes __metadata__ in random order; fix it so that reruns give the same bytes."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    path.write_bytes(raw[:8] + text + raw[8 + size:])


def write(model, x, out, dtype, meta, forward=forward, **options):
    """Save the checkpoint in `dtype`; goldens are a float32 forward of the weights as saved."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stored = copy.deepcopy(model).to(dtype)
    for buffer, exact in zip(stored.buffers(), model.buffers()):
        buffer.data = exact.clone()  # correction biases stay float32, as published
    stored.save_pretrained(out, max_shard_size=13 * HIDDEN * INTER * dtype.itemsize // 5, **options)
    (out / "generation_config.json").unlink(missing_ok=True)
    y = forward(stored.to(torch.float32), x)
    save_file({"x": x, **y}, out / "golden.safetensors", metadata={**meta, "weights": str(dtype)[6:]})
    sort_metadata(out / "golden.safetensors")
    for path in out.iterdir():
        path.chmod(0o644)

    reloaded = type(model).from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    if forward is moe.forward:
        reloaded.set_experts_implementation("eager")
    for name, value in forward(reloaded, x).items():
        assert torch.equal(value, y[name]), (out, name)


def rewrite(out, family):
    """The checkpoint as its own code spells it, where transformers has only the formulas."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    index_path = out / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    names = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors = load_file(out / shard)
        rewritten, listed = moe.as_published(family, config, tensors)
        if listed is not tensors:
            save_file(listed, out / shard, metadata={"format": "pt"})
        names.update(dict.fromkeys(listed, shard))
    index["weight_map"] = dict(sorted(names.items()))
    index_path.write_text(json.dumps(index, indent=2) + "\n")
    path.write_text(json.dumps(rewritten, indent=2, sort_keys=True) + "\n")


# ---- the independent check: raw files, numpy, float64 ----

def read(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data, tensors = json.loads(raw[8:8 + size]), raw[8 + size:], {}
    for name, t in header.items():
        if name != "__metadata__":
            part = data[slice(*t["data_offsets"])]
            flat = {"F32": lambda: np.frombuffer(part, "<f4"),
                    "I32": lambda: np.frombuffer(part, "<i4"),
                    "BF16": lambda: (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32)}[t["dtype"]]()
            tensors[name] = flat.reshape(t["shape"]).astype(np.float64)
    return tensors


def silu(z):
    return z / (1 + np.exp(-z))


def gelu_erf(z):
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def gelu_tanh(z):
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)))


def by_hand(family, w, n, x):
    """(y, pre-activation) of layer n."""
    def linear(name, v, transpose=True):
        m = w[name + ".weight"]
        return v @ (m.T if transpose else m) + w.get(name + ".bias", 0.0)

    if family == "gpt2":
        p = f"transformer.h.{n}.mlp."
        z = linear(p + "c_fc", x, transpose=False)
        return linear(p + "c_proj", gelu_tanh(z), transpose=False), z
    if family == "bert":
        p = f"bert.encoder.layer.{n}."
        z = linear(p + "intermediate.dense", x)
        return linear(p + "output.dense", gelu_erf(z)), z
    if family == "opt":
        p = f"model.decoder.layers.{n}."
        z = linear(p + "fc1", x)
        return linear(p + "fc2", np.maximum(z, 0)), z
    p = ("model.language_model." if family == "qwen3_5" else "model.") + f"layers.{n}.mlp."
    if family in ("phi3", "glm4"):
        z, up = np.split(linear(p + "gate_up_proj", x), 2, axis=-1)
    else:
        z, up = linear(p + "gate_proj", x), linear(p + "up_proj", x)
    act = gelu_tanh if family == "gemma3_text" else silu
    return linear(p + "down_proj", act(z) * up), z


def read_checkpoint(out):
    """(all weights by name, name of each one's file, number of files)."""
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {name: read(out / name) for name in set(index.values())}
    assert len(shards) >= 3, (out, len(shards))
    weights = {name: shards[shard][name] for name, shard in index.items()}
    assert sum(map(len, shards.values())) == len(weights)
    return weights, index, len(shards)


def check(family, out):
    weights, index, shards = read_checkpoint(out)
    golden = read(out / "golden.safetensors")
    apart = [n for n in range(LAYERS) for p in index if p.endswith(f"layers.{n}.mlp.gate_proj.weight")
             and index[p] != index[p.replace("gate_proj", "up_proj")]]
    for n in range(LAYERS):
        y, z = by_hand(family, weights, n, golden["x"])
        error = np.abs(y - golden[f"y.{n}"]).max() / np.abs(y).max()
        assert error <= TOLERANCE, (out, n, error)
        assert 0.3 < y.std() < 5 and 0.3 < (z > 0).mean() < 0.7, (out, n, y.std(), (z > 0).mean())
        print(f"{family:12}{out.name:5} layer {n}  error {error:.1e}  std {y.std():.2f}  max {np.abs(y).max():5.2f}  "
              f"gates open {(z > 0).mean():.2f}  shards {shards}  gate and up apart in layers {apart}")


# ---- mixtures of experts ----

def recomputed(family, out):
    """(by hand, golden) of every layer."""
    weights, _, _ = read_checkpoint(out)
    golden = read(out / "golden.safetensors")
    config = json.loads((out / "config.json").read_text())
    layers = sum(name.startswith("y.") for name in golden)
    return [moe.by_hand(moe.base(family), config, weights, n, golden["x"]) for n in range(layers)], golden


def check_moe(family, out):
    layers, golden = recomputed(family, out)
    for n, (y, ids, weights, gaps) in enumerate(layers):
        error = np.abs(y - golden[f"y.{n}"]).max() / np.abs(y).max()
        assert error <= TOLERANCE and 0.2 < y.std() < 10, (out, n, error, y.std())
        line = f"{family:20}{out.name:5} layer {n}  error {error:.1e}  std {y.std():.2f}"
        if ids is not None:
            assert (ids == golden[f"ids.{n}"]).all() and gaps.min() > moe.GAP, (out, n, gaps.min())
            off = np.abs(weights - golden[f"weights.{n}"]).max() / weights.max()
            assert off <= TOLERANCE, (out, n, off)
            line += f"  weights {off:.1e}  gap {gaps.min():.4f}  rows {np.bincount(ids.astype(int).ravel())}"
        print(line)


def make_moe(family, out, meta):
    seed = moe.SEED + list(moe.FAMILIES).index(moe.base(family))
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = moe.FAMILIES[family]().to(torch.float32).eval()
    model.set_experts_implementation("eager")
    moe.reinitialise(model, generator)
    x = torch.randn(4 * moe.TOKENS, moe.HIDDEN, generator=generator).to(torch.bfloat16).to(torch.float32)
    meta = {**meta, "family": family, "seed": str(seed), "experts_implementation": "eager"}

    for dtype in (torch.float32, torch.bfloat16) if family in moe.F32_TOO else (torch.bfloat16,):
        target = out / {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]

        def write_for(x):
            write(model, x, target, dtype, meta, moe.forward, save_original_format=family not in moe.FUSED)

        write_for(x)  # once with more tokens than wanted, to find those far from ties
        gaps = np.min([layer[3] for layer in recomputed(family, target)[0]], axis=0)
        far = torch.from_numpy(gaps > moe.GAP).nonzero().flatten()[:moe.TOKENS]
        assert len(far) == moe.TOKENS, (family, len(far))
        write_for(x[far])
        if family in moe.REWRITTEN:
            rewrite(target, family)
        check_moe(family, target)


@torch.no_grad()
def main():
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    torch.set_num_threads(1)
    meta = {"torch": torch.__version__.split("+")[0], "transformers": tf.__version__, "numpy": np.__version__,
            "safetensors": safetensors.__version__}
    for number, (family, build) in enumerate(FAMILIES.items()):
        if sys.argv[2:] and family not in sys.argv[2:]:
            continue
        seed = SEED + number
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        model = build().to(torch.float32).eval()
        reinitialise(model, generator)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16).to(torch.float32)
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            target = out / family / name
            write(model, x, target, dtype, {**meta, "family": family, "seed": str(seed)})
            check(family, target)
    for family in moe.FAMILIES:
        if not sys.argv[2:] or family in sys.argv[2:]:
            make_moe(family, out / family, meta)


if __name__ == "__main__":
    main()
