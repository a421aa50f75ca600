"""Attention over pages on this GPU: microseconds and the share of the bound, beside torch and FlashInfer.

`python scripts/bench/cuda_attention.py [decode] [prompt]`. The attention of torch has contiguous keys and values
instead of pages. FlashInfer is measured without the time of its plan. The fastest implementation of a peer counts.
Reads bound decode, a bfloat16 product bounds prompts; both rates are measured in this process. The data is random and
larger than the L2 cache. Results are medians of CUDA graphs that are replayed alternately.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flashinfer_decode
import torch
import triton
import triton.language as tl
from rows import Row, parser, row, save
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from localllm.kernels.compiled.library import LibraryMissing
from localllm.kernels.ops.attention import Rows
from localllm.kernels.ops.attention import paged_attention as reference
from localllm.kernels.triton import attention as in_triton

ROUNDS = 7
BEYOND_CACHE = 300_000_000  # bytes
MAX_SETS = 40
MIN_CALLS = 4  # in a graph: the launch of a graph takes time
READ = 1 << 31  # bytes
GOLDEN = 0.6180339887
TORCH = "flash", "cudnn"
FLASHINFER = "flashinfer", "flashinfer, tensor cores"

Call = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Case:
    lens: Sequence[tuple[int, int]]  # (queries, context) of each row
    heads: int = 32
    kv_heads: int = 8
    window: int = 0
    page: int = 16
    dim: int = 128

    def __str__(self) -> str:
        queries, context = self.lens[0]
        shortest = min(self.lens)[1]
        longest = max(self.lens)[1]
        title = f"{len(self.lens)} x {queries} of {context}"
        if shortest != longest:
            title = f"{len(self.lens)} of {shortest} to {longest}"
        title += f", {self.heads}/{self.kv_heads} heads"
        if self.window:
            title += f", window {self.window}"
        if self.page != 16:
            title += f", pages of {self.page}"
        if self.dim != 128:
            title += f", head size {self.dim}"
        return title

    @property
    def bytes(self) -> int:
        keys = 0
        queries = 0
        for row_queries, context in self.lens:
            keys += min(context, self.window + row_queries) if self.window else context
            queries += row_queries
        return 4 * self.dim * (self.kv_heads * keys + self.heads * queries)

    @property
    def operations(self) -> float:
        scores = 0  # per head
        for queries, context in self.lens:
            for position in range(context - queries, context):
                scores += min(position + 1, self.window or position + 1)
        return 4.0 * self.dim * self.heads * scores


def spread(rows: int, positions: int) -> list[tuple[int, int]]:
    """Decode rows with `positions` in all, each with 0.1 to 1.9 times the mean, in pseudorandom order."""
    return [(1, round(positions / rows * (0.1 + 1.8 * (row * GOLDEN % 1)))) for row in range(rows)]


# (rows, positions in all) of steps of the engine while it served 256 requests, with fewer rows towards the end.
SERVED = [(256, 156085), (204, 164773), (143, 142050), (90, 109292), (48, 69447), (20, 30914)]
RAGGED = [(1, context) for context in range(6400, 0, -100)]
DECODE = [
    *(Case([(1, context)]) for context in (128, 1024, 8192, 32768)),
    *(Case([(1, context)] * rows) for rows, context in ((4, 1024), (4, 8192), (16, 1024), (16, 4096), (64, 512))),
    Case([(1, 4096)] * 32),
    Case([(1, 32768)] * 8),
    *(Case([(1, context)] * rows, heads=16) for rows, context in ((1, 1024), (8, 4096), (64, 1024), (256, 1024))),
    *(Case([(1, context)] * rows, 28, 4) for rows, context in ((1, 4096), (16, 4096), (64, 1024))),
    *(Case([(1, context)] * rows, page=64) for rows, context in ((1, 1024), (32, 4096), (8, 32768))),
    Case(RAGGED),
    *(Case(spread(rows, positions), heads=16) for rows, positions in SERVED),
    Case([(1, 8192)] * 16, window=1024),
    *(Case([(1, 4096)] * rows, 32, 32, dim=96) for rows in (1, 16)),
    *(Case([(1, 4096)] * rows, 8, 4, dim=256) for rows in (1, 16)),
]
PROMPTS = [
    *(Case([(tokens, tokens)]) for tokens in (128, 512, 1024, 2048, 8192, 16384)),
    *(Case([(tokens, tokens)], heads=16) for tokens in (128, 1024, 8192, 16384)),
    Case([(8192, 8192)], page=64),
    Case([(512, 8192)]),
    *(Case([(1024, 8192)], window=window) for window in (0, 1024)),
    Case([(1024, 1024)] * 8),
    Case([(128, 128)] * 32),
    *(Case([(2048, 2048)], heads, kv_heads, dim=dim) for heads, kv_heads, dim in ((32, 32, 96), (8, 4, 256))),
]
CASES = {"decode": DECODE, "prompt": PROMPTS}


@triton.jit
def _sum(numbers, out, SIZE: tl.constexpr, TIMES: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE * TIMES
    total = tl.zeros([SIZE], tl.int32)
    for time in tl.static_range(TIMES):
        total += tl.load(numbers + start + time * SIZE + tl.arange(0, SIZE))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def milliseconds(call: Call) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def bandwidth() -> float:
    """Read bandwidth in bytes per microsecond: the fastest of several shapes of one kernel."""
    numbers = torch.randn(READ // 4, device="cuda").view(torch.int32)
    out = torch.empty(READ // 4 // 4096, dtype=torch.int32, device="cuda")
    medians = []
    for size, times, warps in ((2048, 4, 4), (4096, 4, 8), (2048, 8, 4), (4096, 8, 4)):
        runs = [
            milliseconds(lambda: _sum[(READ // 4 // size // times,)](numbers, out, size, times, num_warps=warps))  # noqa: B023
            for _ in range(ROUNDS + 1)
        ]
        medians.append(statistics.median(runs[1:]))
    return READ / min(medians) / 1e3


def product_rate() -> float:
    """Operations per microsecond of a large bfloat16 product."""
    matrices = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    times = [milliseconds(lambda: matrices[0] @ matrices[1]) for _ in range(ROUNDS + 1)]
    return 2.0 * 8192**3 / statistics.median(times[1:]) / 1e3


def inputs(case: Case) -> list[dict[str, Any]]:
    """Sets of arguments with the same rows and different caches, as the layers of a model have."""
    needed = [-(-context // case.page) for _, context in case.lens]
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    page_ids = (torch.randperm(sum(needed)) + 1).int()
    for table_row, ids in zip(table, page_ids.split(needed), strict=True):
        table_row[: len(ids)] = ids
    queries, contexts = zip(*case.lens, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    rows = Rows(starts, torch.tensor(contexts).int().cuda(), table.cuda(), queries, contexts)
    sets = []
    for _ in range(min(MAX_SETS, BEYOND_CACHE // case.bytes + 1)):
        cache = torch.randn(2, sum(needed) + 1, case.page, case.kv_heads, case.dim, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(sum(queries), case.heads, case.dim, device="cuda", dtype=torch.bfloat16)
        sets.append({"query": query, "key_pages": cache[0], "value_pages": cache[1], "rows": rows})
    return [{**arguments, "scale": case.dim**-0.5, "window": case.window} for arguments in sets]


def torch_calls(case: Case, sets: int) -> Mapping[str, list[Callable[[], object]]]:
    """Calls of torch's attention over contiguous keys and values; none if torch cannot compute the case."""
    queries, context = case.lens[0]
    if case.window or len(set(case.lens)) > 1 or 1 < queries < context:
        return {}
    shape = len(case.lens), case.kv_heads, context, case.dim
    data = [torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    query = torch.randn(shape[0], case.heads, queries, case.dim, device="cuda", dtype=torch.bfloat16)

    def attend(backend: SDPBackend, cache: torch.Tensor) -> object:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, *cache, is_causal=queries > 1, enable_gqa=True)

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return {
        name: [lambda backend=backend, cache=cache: attend(backend, cache) for cache in data]
        for name, backend in backends.items()
    }


def replays(calls: Sequence[Callable[[], object]], times: int) -> Callable[[], None]:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (*calls,) * times:
            call()
    return graph.replay


def timed(case: Case, implementations: Mapping[str, Call]) -> Mapping[str, float]:
    """Microseconds of each implementation and peer. Outputs are checked first."""
    sets = inputs(case)
    repeats = -(-MIN_CALLS // len(sets))
    expected = reference(**sets[0])
    calls: dict[str, Callable[[], None]] = {}
    for name, implementation in implementations.items():
        torch.testing.assert_close(implementation(**sets[0]), expected, rtol=2e-2, atol=2e-2)
        calls[name] = replays(
            [lambda arguments=arguments, f=implementation: f(**arguments) for arguments in sets], repeats
        )
    peers = {**flashinfer_decode.decode(sets), **torch_calls(case, len(sets))}
    for name, peer_calls in peers.items():
        if name in FLASHINFER:
            torch.testing.assert_close(peer_calls[0](), expected, rtol=2e-2, atol=2e-2)
        try:
            calls[name] = replays(peer_calls, repeats)
        except RuntimeError as error:  # no such implementation for this case
            print(f"{case}: {name}: {str(error)[:100]}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            times[name].append(milliseconds(call) * 1e3 / (repeats * len(sets)))
    return {name: statistics.median(measured[1:]) for name, measured in times.items()}


def measure(kinds: Sequence[str]) -> Iterator[Row]:
    implementations: dict[str, Call] = {"triton": in_triton.paged_attention}
    try:
        from localllm.kernels.cuda.attention import paged as in_cuda

        implementations = {"cuda": in_cuda.paged_attention, **implementations}
    except (LibraryMissing, AttributeError) as error:  # the library is not built, or built without attention
        print(error, file=sys.stderr)
    device = torch.cuda.get_device_name()
    read = bandwidth()
    rate = product_rate()
    yield row("ceiling, read", read / 1e3, "GB/s", device=device, rounds=ROUNDS)
    yield row("ceiling, product", rate / 1e6, "TFLOP/s", device=device, rounds=ROUNDS)
    for kind in kinds:
        for case in CASES[kind]:
            times = timed(case, implementations)
            bound = max(case.bytes / read, case.operations / rate)
            for name in implementations:
                title = f"{kind}, {name}, {case}"
                compared = {**against("", TORCH, times, name), **against("flashinfer_", FLASHINFER, times, name)}
                share = bound / times[name]
                yield row(title, times[name], "µs", bound_share=share, device=device, rounds=ROUNDS, **compared)


def against(prefix: str, peers: Sequence[str], times: Mapping[str, float], name: str) -> dict[str, float]:
    """The time of the fastest measured peer, and its ratio to the time of implementation `name`."""
    best = min((times[peer] for peer in peers if peer in times), default=None)
    return {} if best is None else {f"{prefix}peer": round(best, 2), f"{prefix}ratio": round(best / times[name], 3)}


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("kinds", nargs="*", help=f"default: {' '.join(CASES)}")
    chosen = arguments.parse_args().kinds
    save("cuda_attention", measure(chosen or list(CASES)), part=bool(chosen))
