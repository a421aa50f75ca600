"""Products on this GPU: microseconds beside torch in bf16, and for small batches the share of the bound.

`python scripts/bench/cuda_linear.py [--lane triton] [FORMAT …]`. `--lane triton` measures products of up to 16 rows
without the CUDA library. int4-64 has groups of 64 inputs, fp8-channel one scale for each output. Each graph computes
products with several weights, together larger than the L2 cache. Results are medians; the graphs alternate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rows import Row, parser, row, save

from localllm.kernels.ops.linear import Fp8, Int4, Int8, Linear, Weight, map_tensors, weight_tensors

ROUNDS = 7
WEIGHT_BYTES = 6e8  # minimum of all weights of a graph
ROWS = (1, 2, 4, 8, 16)
MANY = (64, 256, 2048)
SHAPES = (  # (in_features, out_features) of Llama-3.1-8B, then of Qwen3-0.6B
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    *((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)),
)
FORMATS = ("dense", "int8", "int4", "int4_wide", "fp8")
TRITON = ("int8", "int4", "int4-64", "int4-32", "int4_wide", "fp8", "fp8-channel")  # with --lane triton
GROUP = 128


def weight_of(op: str, out_features: int, in_features: int, group: int) -> Weight:
    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device="cuda") / (64.0 * in_features**0.5)

    if op == "dense":
        return torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) / in_features**0.5
    values = torch.randint(-127, 128, (out_features, in_features), device="cuda", dtype=torch.int8)
    if op == "int8":
        return Int8(values, scale(out_features))
    if op == "fp8":
        return Fp8(values.float().to(torch.float8_e4m3fn), scale(out_features, in_features // group), group)
    zero = torch.full((out_features, in_features // group), 8, dtype=torch.uint8, device="cuda")
    return Int4(
        values[:, : in_features // 2].contiguous().view(torch.uint8),
        scale(out_features, in_features // group).half(),
        zero,
        group,
        in_features,
    )


def captured(call: Callable[[int], object], times: int) -> torch.cuda.CUDAGraph:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(times):
            call(index)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / times


def read_bandwidth() -> float:
    """Read bandwidth in bytes per microsecond: torch's sum of 4 GiB."""
    source = torch.randn(2**30, device="cuda")
    graph = captured(lambda _: source.view(2**15, -1).sum(-1), 1)
    return source.nbytes / min(microseconds(graph, 1) for _ in range(ROUNDS))


def group_of(fmt: str, in_features: int) -> int:
    group = fmt.partition("-")[2]
    return in_features if group == "channel" else int(group or GROUP)


def measure_shape(
    linears: Linear,
    product: Callable[[torch.Tensor, Any], Any],
    fmt: str,
    in_features: int,
    out_features: int,
    bandwidth: float,
) -> Iterator[Row]:
    op = fmt.partition("-")[0]
    weight = linears.pack(weight_of(op, out_features, in_features, group_of(fmt, in_features)), torch.bfloat16)
    size = sum(part.nbytes for part in weight_tensors(weight))
    times = max(2, int(WEIGHT_BYTES / size) + 1)
    weights = [map_tensors(weight, torch.clone) for _ in range(times)]
    plain = [
        torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, times * size // (2 * out_features * in_features)))
    ]
    for rows in ROWS:
        x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
        assert product(x, weight).isfinite().all()
        graphs = [captured(partial(lambda x, index: product(x, weights[index]), x), times)]
        graphs += [captured(partial(lambda x, index: torch.mm(x, plain[index].t()), x), len(plain))]
        pairs = [(microseconds(graphs[0], times), microseconds(graphs[1], len(plain))) for _ in range(ROUNDS + 1)][1:]
        time, torch_time = map(statistics.median, zip(*pairs, strict=True))
        bound = (size + 2 * rows * (in_features + out_features)) / bandwidth
        title = f"linear.{fmt}, {in_features} to {out_features}, {rows} rows"
        ratio = statistics.median(other / own for own, other in pairs)
        yield figure(title, time, torch_time, ratio, bound_share=bound / time)


def measure_many(linears: Linear, op: str, in_features: int, out_features: int) -> Iterator[Row]:
    """Large batches, as in prompts, by the kernel that the product chooses."""
    weights = [linears.pack(weight_of(op, out_features, in_features, GROUP), torch.bfloat16) for _ in range(2)]
    plain = [torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for rows in MANY:
        x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
        assert getattr(linears, op)(x, weights[0]).isfinite().all()
        graphs = [
            captured(partial(lambda x, index: getattr(linears, op)(x, weights[index % 2]), x), 4),
            captured(partial(lambda x, index: torch.mm(x, plain[index % 2].t()), x), 4),
        ]
        pairs = [(microseconds(graphs[0], 4), microseconds(graphs[1], 4)) for _ in range(ROUNDS + 1)][1:]
        time, torch_time = map(statistics.median, zip(*pairs, strict=True))
        ratio = statistics.median(other / own for own, other in pairs)
        yield figure(f"linear.{op}, {in_features} to {out_features}, {rows} rows", time, torch_time, ratio)


def figure(title: str, time: float, torch_time: float, ratio: float, **more: float) -> Row:
    device = torch.cuda.get_device_name()
    return row(title, time, "µs", peer=round(torch_time, 2), ratio=ratio, device=device, rounds=ROUNDS, **more)


def small_batch(op: str, x: torch.Tensor, weight: Any) -> Any:
    """The kernel for small batches, even if the wrapper would call torch."""
    from localllm.kernels.cuda.products import linear

    return linear.small_batch(x, weight, None, x.dtype, linear.INT4_WIDE if op == "int4_wide" else None)


def measure(formats: list[str]) -> Iterator[Row]:
    from localllm.kernels.cuda.products import linear

    linears = Linear(**{name: getattr(linear, name) for name in FORMATS}, pack_slices=linear.pack_slices)
    bandwidth = read_bandwidth()
    yield row("ceiling, reading", bandwidth / 1e3, "GB/s", device=torch.cuda.get_device_name(), rounds=ROUNDS)
    for op in formats:
        for in_features, out_features in SHAPES:
            yield from measure_shape(linears, partial(small_batch, op), op, in_features, out_features, bandwidth)
        for in_features, out_features in SHAPES[:4] if op != "dense" else ():
            yield from measure_many(linears, op, in_features, out_features)


def measure_triton(formats: list[str]) -> Iterator[Row]:
    from localllm.kernels.triton import linear

    linears = Linear(pack_slices=linear.pack_slices)
    bandwidth = read_bandwidth()
    yield row("ceiling, reading", bandwidth / 1e3, "GB/s", device=torch.cuda.get_device_name(), rounds=ROUNDS)
    for fmt in formats:
        for in_features, out_features in SHAPES:
            product = getattr(linear, fmt.partition("-")[0])
            yield from measure_shape(linears, product, fmt, in_features, out_features, bandwidth)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--lane", choices=["library", "triton"], default="library")
    arguments.add_argument("formats", nargs="*")
    options = arguments.parse_args()
    if options.lane == "triton":
        save("cuda_linear_triton", measure_triton(options.formats or list(TRITON)))
    else:
        save("cuda_linear", measure(options.formats or list(FORMATS)))
