"""PyTorch's time for the layer of gpu_speed: three bf16 linears and silu(gate) * up, weights cold.

Prints medians over interleaved repeats, by CUDA events. Needs a GPU and torch.
"""

import statistics

import torch
import torch.nn.functional as F

HIDDEN, INTERMEDIATE = 4096, 14336
REPEATS = 30


def timed(work):
    """Milliseconds of the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def weight(outputs, inputs):
    return torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5


def main():
    torch.manual_seed(1)
    # Two sets of 352 MB in turn: neither is in the L2 cache when its turn comes.
    layers = [
        (weight(2 * INTERMEDIATE, HIDDEN), weight(HIDDEN, INTERMEDIATE)) for _ in range(2)
    ]

    def forward(layer, x):
        gate, up = F.linear(x, layer[0]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer[1])

    print(f"# torch {torch.__version__}, {torch.cuda.get_device_name()}, merged gate_up, not compiled")
    with torch.inference_mode():
        for tokens in (1, 16, 512, 4096):
            x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
            times = [timed(lambda: forward(layers[i % 2], x)) for i in range(REPEATS + 3)]
            print(f"{tokens:7d} tokens {statistics.median(times[3:]) * 1e3:10.1f} us")


if __name__ == "__main__":
    main()
