"""Products on the GPU here: microseconds beside torch's bf16, of few rows the share of what reading alone takes.

`python scripts/bench/cuda_linear.py [--lane triton] [FORMAT …]`. Lane `triton`: products of up to 16 rows without the
CUDA library. int4-64 has groups of 64 inputs, fp8-channel a scale for each output. Graphs of products whose weights
take turns beyond the second-level cache; medians of interleaved rounds; every answer is looked at before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rows import Row, row, save

from localllm.kernels.ops.linear import Fp8, Int4, Int8, Linear, Weight, map_tensors, weight_tensors

ROUNDS, TURNS_BYTES = 7, 6e8
ROWS = (1, 2, 4, 8, 16)
MANY = (64, 256, 2048)
SHAPES = (  # ins, outs: of Llama-3.1-8B, of Qwen3-0.6B
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    *((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)),
)
FORMATS = ("dense", "int8", "int4", "int4_wide", "fp8")
TRITON = ("int8", "int4", "int4-64", "int4-32", "int4_wide", "fp8", "fp8-channel")  # by the other lane
GROUP = 128


def weight_of(op: str, outs: int, ins: int, group: int) -> Weight:
    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device="cuda") / (64.0 * ins**0.5)

    if op == "dense":
        return torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) / ins**0.5
    whole = torch.randint(-127, 128, (outs, ins), device="cuda", dtype=torch.int8)
    if op == "int8":
        return Int8(whole, scale(outs))
    if op == "fp8":
        return Fp8(whole.float().to(torch.float8_e4m3fn), scale(outs, ins // group), group)
    zero = torch.full((outs, ins // group), 8, dtype=torch.uint8, device="cuda")
    return Int4(whole[:, : ins // 2].contiguous().view(torch.uint8), scale(outs, ins // group).half(), zero, group, ins)


def captured(call: Callable[[int], object], times: int) -> torch.cuda.CUDAGraph:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(times):
            call(turn)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / times


def reading() -> float:
    """Bytes a microsecond that a sum of 4 GiB reads, the best of torch's."""
    source = torch.randn(2**30, device="cuda")
    graph = captured(lambda _: source.view(2**15, -1).sum(-1), 1)
    return source.nbytes / min(microseconds(graph, 1) for _ in range(ROUNDS))


def group_of(fmt: str, ins: int) -> int:
    group = fmt.partition("-")[2]
    return ins if group == "channel" else int(group or GROUP)


def measure_shape(
    ours: Linear, product: Callable[[torch.Tensor, Any], Any], fmt: str, ins: int, outs: int, ceiling: float
) -> Iterator[Row]:
    op = fmt.partition("-")[0]
    weight = ours.pack(weight_of(op, outs, ins, group_of(fmt, ins)), torch.bfloat16)
    size = sum(part.nbytes for part in weight_tensors(weight))
    times = max(2, int(TURNS_BYTES / size) + 1)
    weights = [map_tensors(weight, torch.clone) for _ in range(times)]
    plain = [
        torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, times * size // (2 * outs * ins)))
    ]
    for rows in ROWS:
        x = torch.randn(rows, ins, device="cuda", dtype=torch.bfloat16)
        assert product(x, weight).isfinite().all()
        graphs = [captured(partial(lambda x, turn: product(x, weights[turn]), x), times)]
        graphs += [captured(partial(lambda x, turn: torch.mm(x, plain[turn].t()), x), len(plain))]
        pairs = [(microseconds(graphs[0], times), microseconds(graphs[1], len(plain))) for _ in range(ROUNDS + 1)][1:]
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        least = (size + 2 * rows * (ins + outs)) / ceiling
        title = f"linear.{fmt}, {ins} to {outs}, {rows} rows"
        ratio = statistics.median(theirs / mine for mine, theirs in pairs)
        yield figure(title, mine, theirs, ratio, bound_share=least / mine)


def measure_many(ours: Linear, op: str, ins: int, outs: int) -> Iterator[Row]:
    """Rows of prompts, by whatever the device's product chooses."""
    weights = [ours.pack(weight_of(op, outs, ins, GROUP), torch.bfloat16) for _ in range(2)]
    plain = [torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for rows in MANY:
        x = torch.randn(rows, ins, device="cuda", dtype=torch.bfloat16)
        assert getattr(ours, op)(x, weights[0]).isfinite().all()
        graphs = [
            captured(partial(lambda x, turn: getattr(ours, op)(x, weights[turn % 2]), x), 4),
            captured(partial(lambda x, turn: torch.mm(x, plain[turn % 2].t()), x), 4),
        ]
        pairs = [(microseconds(graphs[0], 4), microseconds(graphs[1], 4)) for _ in range(ROUNDS + 1)][1:]
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / mine for mine, theirs in pairs)
        yield figure(f"linear.{op}, {ins} to {outs}, {rows} rows", mine, theirs, ratio)


def figure(title: str, mine: float, theirs: float, ratio: float, **more: float) -> Row:
    device = torch.cuda.get_device_name()
    return row(title, mine, "µs", peer=round(theirs, 2), ratio=ratio, device=device, rounds=ROUNDS, **more)


def small_batch(op: str, x: torch.Tensor, weight: Any) -> Any:
    """Our kernel, also where the wrapper leaves the product to torch."""
    from localllm.kernels.cuda import linear

    return linear.small_batch(x, weight, None, x.dtype, linear.INT4_WIDE if op == "int4_wide" else None)


def measure(formats: list[str]) -> Iterator[Row]:
    from localllm.kernels.cuda import linear

    ours = Linear(**{name: getattr(linear, name) for name in FORMATS}, pack_slices=linear.pack_slices)
    ceiling = reading()
    yield row("ceiling, reading", ceiling / 1e3, "GB/s", device=torch.cuda.get_device_name(), rounds=ROUNDS)
    for op in formats:
        for ins, outs in SHAPES:
            yield from measure_shape(ours, partial(small_batch, op), op, ins, outs, ceiling)
        for ins, outs in SHAPES[:4] if op != "dense" else ():
            yield from measure_many(ours, op, ins, outs)


def measure_triton(formats: list[str]) -> Iterator[Row]:
    from localllm.kernels.triton import linear

    ours, ceiling = Linear(pack_slices=linear.pack_slices), reading()
    yield row("ceiling, reading", ceiling / 1e3, "GB/s", device=torch.cuda.get_device_name(), rounds=ROUNDS)
    for fmt in formats:
        for ins, outs in SHAPES:
            product = getattr(linear, fmt.partition("-")[0])
            yield from measure_shape(ours, product, fmt, ins, outs, ceiling)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=["library", "triton"], default="library")
    parser.add_argument("formats", nargs="*")
    options = parser.parse_args()
    if options.lane == "triton":
        save("cuda_linear_triton", measure_triton(options.formats or list(TRITON)))
    else:
        save("cuda_linear", measure(options.formats or list(FORMATS)))
