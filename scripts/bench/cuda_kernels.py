"""The CUDA C++ kernels on this GPU: microseconds beside torch, and the share of the bandwidth of a copy.

`python scripts/bench/cuda_kernels.py`. The data is random and larger than the L2 cache. Results are medians; kernels
and torch alternate.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from rows import Row, parser, row, save

from localllm.kernels.ops import Ops

ROUNDS = 9
REPEATS = 20
TOKENS = 16384
HIDDEN = 4096
HEADS = 32
DIM = 128

Call = Callable[[], object]


def microseconds(call: Call) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / REPEATS


def cases(dtype: torch.dtype) -> Mapping[str, tuple[int, Call, Call]]:
    """Op -> bytes that it must move, the call of the kernel, the call of the reference."""
    from localllm.kernels.compiled import activation, norm, rope
    from localllm.kernels.cuda.layers import kv

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)

    plain = Ops()
    x = random(TOKENS, HIDDEN)
    residual = random(TOKENS, HIDDEN)
    weight = random(HIDDEN)
    gate_up = random(TOKENS, 16384)
    heads = random(TOKENS, HEADS, DIM)
    key = random(TOKENS, 8, DIM)
    angle = torch.rand(TOKENS, DIM // 2, device="cuda")
    cos = angle.cos()
    sin = angle.sin()
    pages = random(2, TOKENS // 16 + 1, 16, 8, DIM)
    slots = torch.randperm(TOKENS, device="cuda")
    rotated = heads.clone(), key.clone()
    return {
        "norm.rms": (2 * x.nbytes, lambda: norm.rms_norm(x, weight, 1e-6), lambda: plain.norm.rms(x, weight, 1e-6)),
        "norm.add_rms": (
            4 * x.nbytes,
            lambda: norm.add_rms_norm(x, residual, weight, 1e-6),
            lambda: plain.norm.add_rms(x, residual, weight, 1e-6),
        ),
        "activation.silu_and_mul": (
            gate_up.nbytes * 3 // 2,
            lambda: activation.silu_and_mul(gate_up),
            lambda: plain.activation.silu_and_mul(gate_up),
        ),
        "rope.neox": (
            2 * (heads.nbytes + key.nbytes) + cos.nbytes + sin.nbytes,
            lambda: rope.rope(*rotated, cos, sin),
            lambda: plain.rope.neox(heads, key, cos, sin),
        ),
        "kv.store": (
            4 * key.nbytes,
            lambda: kv.store(key, key, pages[0], pages[1], slots),
            lambda: plain.kv.store(key, key, pages[0], pages[1], slots),
        ),
    }


def measure() -> Iterator[Row]:
    importlib.import_module("localllm.kernels.cuda")
    device = torch.cuda.get_device_name()
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(microseconds(lambda: target.copy_(source)) for _ in range(ROUNDS))
    bandwidth = 2 * source.nbytes / copy  # bytes per microsecond
    yield row("ceiling, copy", bandwidth / 1e3, "GB/s", device=device, rounds=ROUNDS)
    for dtype in (torch.bfloat16, torch.float32):
        for name, (size, kernel, reference) in cases(dtype).items():
            pairs = [(microseconds(kernel), microseconds(reference)) for _ in range(ROUNDS + 1)][1:]
            kernel_time, torch_time = map(statistics.median, zip(*pairs, strict=True))
            title = f"{name}, {TOKENS} tokens, {str(dtype).removeprefix('torch.')}"
            ratio = statistics.median(other / own for own, other in pairs)
            facts = {"ratio": ratio, "bound_share": size / kernel_time / bandwidth, "rounds": ROUNDS}
            yield row(title, kernel_time, "µs", peer=round(torch_time, 2), device=device, **facts)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    save("cuda_kernels", measure())
