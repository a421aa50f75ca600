"""The small kernels of a decode step on this GPU: microseconds of each call in a replayed graph.

`python scripts/bench/cuda_steps.py`. Every call of a graph has its own arguments. Together they are larger than the L2
cache, so each call reads from memory, as in a step of a large model. The bound is the time of a sum of as many bytes.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rows import Row, parser, row, save

from localllm.kernels.ops import Ops
from localllm.kernels.ops.sampling import Draws

ROUNDS = 7
BEYOND_CACHE = 2**27  # bytes
MAX_SETS = 64

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """`make` creates arguments; `ops` are the implementations to compare, the one in use first."""

    label: str
    bytes: int
    make: Callable[[], Arguments]
    ops: Mapping[str, Callable[..., Any]]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def norm(rows: int, hidden: int) -> Arguments:
    return {"x": random(rows, hidden), "residual": random(rows, hidden), "weight": random(hidden), "eps": 1e-6}


def append(rows: int, heads: int, kv_heads: int) -> Arguments:
    pages = random(2, 4 * rows + 1, 16, kv_heads, 128)
    angle = torch.rand(rows, 64, device="cuda")
    return {
        "qkv": random(rows, heads + 2 * kv_heads, 128),
        "query_norm": random(128),
        "key_norm": random(128),
        "eps": 1e-6,
        "offset": 0.0,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "rotation": "neox",
        "slots": torch.randperm(64 * rows, device="cuda")[:rows],
        "key_pages": pages[0],
        "value_pages": pages[1],
    }


def draw(rows: int, vocab: int, **filters: float) -> Arguments:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.full((rows,), filters[name], device="cuda", dtype=dtype) if name in filters else None

    ints = torch.randint(0, 2**31 - 1, (3, rows), device="cuda", dtype=torch.int32)
    top_k, top_p, min_p = (
        column(name, torch.int32 if name == "top_k" else torch.float32) for name in ("top_k", "top_p", "min_p")
    )
    heat = torch.full((rows,), filters.get("temperature", 1.0), device="cuda")
    return {
        "logits": logits(rows, vocab),
        "draws": Draws(heat, *ints, top_k, top_p, min_p, int(filters.get("top_k", vocab))),
    }


def logits(rows: int, vocab: int) -> torch.Tensor:
    """Logits with a few hundred likely tokens, as a model has."""
    x = torch.randn(rows, vocab, device="cuda")
    return x * 2.0 + x.clamp(min=2.0) * 2.0


def steps() -> Iterator[Step]:
    from localllm.kernels.compiled import activation as cuda_activation
    from localllm.kernels.compiled import norm as cuda_norm
    from localllm.kernels.cuda.layers import kv as cuda_kv
    from localllm.kernels.triton import activation, kv, sampling
    from localllm.kernels.triton import norm as triton_norm

    plain = Ops()
    norms = {"ours": cuda_norm.add_rms_norm, "triton": triton_norm.add_rms_norm, "torch": plain.norm.add_rms}
    gates = {
        "ours": cuda_activation.silu_and_mul,
        "triton": activation.silu_and_mul,
        "torch": plain.activation.silu_and_mul,
    }
    appends = {"ours": cuda_kv.append, "triton": kv.append, "torch": plain.kv.append}
    for rows in (1, 16, 64):
        for hidden in (1024, 4096):
            size = 6 * rows * hidden
            yield Step(f"norm.add_rms, {rows} × {hidden}", size, lambda r=rows, h=hidden: norm(r, h), norms)  # type: ignore[misc]
        for heads, inner in ((16, 3072), (32, 14336)):
            size = 2 * rows * (heads + 16) * 128
            yield Step(f"kv.append, {rows} × {heads}/8", size, lambda r=rows, h=heads: append(r, h, 8), appends)  # type: ignore[misc]
            size = 4 * rows * inner
            make = lambda r=rows, i=inner: {"gate_up": random(r, 2 * i)}  # noqa: E731
            yield Step(f"activation.silu_and_mul, {rows} × {inner}", size, make, gates)  # type: ignore[arg-type]
    yield from draws(sampling, plain)


def draws(sampling: Any, plain: Ops) -> Iterator[Step]:
    vocab = 151936
    settings: Mapping[str, dict[str, float]] = {
        "temperature": {"temperature": 0.8},
        "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        "top_p 0.9": {"top_p": 0.9},
        "min_p 0.05": {"min_p": 0.05},
        "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    }
    for rows in (1, 64):
        size = 4 * rows * vocab
        make = lambda r=rows: {"logits": logits(r, vocab)}  # noqa: E731
        ops = {"ours": sampling.greedy, "torch": plain.sampling.greedy}
        yield Step(f"sampling.greedy, {rows} rows", size, make, ops)  # type: ignore[arg-type]
        for label, filters in settings.items():
            ops = {"ours": sampling.draw, "torch": plain.sampling.draw}
            make = lambda r=rows, f=filters: draw(r, vocab, **f)  # noqa: E731
            yield Step(f"sampling.draw, {label}, {rows} rows", size, make, ops)  # type: ignore[arg-type]
        tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        for k in (0, 20):
            ops = {"ours": sampling.logprobs, "torch": plain.sampling.logprobs}
            make = lambda r=rows, t=tokens, k=k: {"logits": logits(r, vocab), "tokens": t, "k": k}  # noqa: E731
            yield Step(f"sampling.logprobs, {k} listed, {rows} rows", size, make, ops)  # type: ignore[arg-type]


def captured(op: Callable[..., Any], sets: list[Arguments]) -> torch.cuda.CUDAGraph:
    for arguments in sets[:2]:
        op(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            op(**arguments)
    graph.replay()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def measure() -> Iterator[Row]:
    importlib.import_module("localllm.kernels.cuda")
    device = torch.cuda.get_device_name()
    source = torch.randn(2**28, device="cuda")
    sums = captured(lambda: source.sum(), [{}] * 4)
    rate = source.nbytes / statistics.median(microseconds(sums, 4) for _ in range(ROUNDS))  # bytes per microsecond
    yield row("ceiling, sum", rate / 1e3, "GB/s", device=device, rounds=ROUNDS)
    for step in steps():
        sets = [step.make() for _ in range(max(4, min(MAX_SETS, BEYOND_CACHE // step.bytes)))]
        graphs = {name: captured(op, sets) for name, op in step.ops.items()}
        rounds = [{name: microseconds(graph, len(sets)) for name, graph in graphs.items()} for _ in range(ROUNDS)]
        times = {name: statistics.median(times[name] for times in rounds) for name in graphs}
        others = {name: round(time, 2) for name, time in times.items() if name != "ours"}
        share = step.bytes / rate / times["ours"]
        yield row(step.label, times["ours"], "µs", **others, bound_share=share, device=device, rounds=ROUNDS)
        del graphs, sets


if __name__ == "__main__":
    parser(__doc__).parse_args()
    save("cuda_steps", measure())
