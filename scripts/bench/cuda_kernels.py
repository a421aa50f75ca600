"""The CUDA C++ kernels on the GPU here: microseconds beside torch's own, and the share of a copy's bandwidth.

`python scripts/bench/cuda_kernels.py`. Random data of more than the second-level cache; medians of interleaved rounds.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from rows import Row, row, save

from localllm.kernels.ops import Ops

ROUNDS, REPEATS = 9, 20
TOKENS, HIDDEN, HEADS, DIM = 16384, 4096, 32, 128

Call = Callable[[], object]


def microseconds(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / REPEATS


def cases(dtype: torch.dtype) -> Mapping[str, tuple[int, Call, Call]]:
    """Op -> bytes that it must move, our call, the reference's."""
    from localllm.kernels.cuda import kv
    from localllm.kernels.elements import activation, norm, rope

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)

    plain = Ops()
    x, stream, weight, gate_up = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN), random(HIDDEN), random(TOKENS, 16384)
    heads, key = random(TOKENS, HEADS, DIM), random(TOKENS, 8, DIM)
    angle = torch.rand(TOKENS, DIM // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    pages = random(2, TOKENS // 16 + 1, 16, 8, DIM)
    slots = torch.randperm(TOKENS, device="cuda")
    turned = heads.clone(), key.clone()
    return {
        "norm.rms": (2 * x.nbytes, lambda: norm.rms_norm(x, weight, 1e-6), lambda: plain.norm.rms(x, weight, 1e-6)),
        "norm.add_rms": (
            4 * x.nbytes,
            lambda: norm.add_rms_norm(x, stream, weight, 1e-6),
            lambda: plain.norm.add_rms(x, stream, weight, 1e-6),
        ),
        "activation.silu_and_mul": (
            gate_up.nbytes * 3 // 2,
            lambda: activation.silu_and_mul(gate_up),
            lambda: plain.activation.silu_and_mul(gate_up),
        ),
        "rope.neox": (
            2 * (heads.nbytes + key.nbytes) + cos.nbytes + sin.nbytes,
            lambda: rope.rope(*turned, cos, sin),
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
    ceiling = 2 * source.nbytes / copy  # bytes a microsecond
    yield row("ceiling, copy", ceiling / 1e3, "GB/s", device=device, rounds=ROUNDS)
    for dtype in (torch.bfloat16, torch.float32):
        for name, (size, ours, theirs) in cases(dtype).items():
            times = [(microseconds(ours), microseconds(theirs)) for _ in range(ROUNDS + 1)][1:]
            own, peer = (statistics.median(column) for column in zip(*times, strict=True))
            title = f"{name}, {TOKENS} tokens, {str(dtype).removeprefix('torch.')}"
            ratio = statistics.median(theirs / ours for ours, theirs in times)
            facts = {"ratio": ratio, "bound_share": size / own / ceiling, "rounds": ROUNDS}
            yield row(title, own, "µs", peer=round(peer, 2), device=device, **facts)


if __name__ == "__main__":
    save("cuda_kernels", measure())
