"""Attention over pages on the GPU here: microseconds, share of the bound, and the peers beside it: torch's own, which
is spared the pages, and FlashInfer where it is installed, whose plan is spared.

`python scripts/bench/cuda_attention.py [decode] [prompt]`. Decode against the read bandwidth of this process, prompts
against the rate of a bfloat16 product; of a peer's implementations the fastest counts. Random data of more than the
second-level cache, which take turns; medians of interleaved replays of CUDA graphs.
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
from rows import Row, row, save
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from localllm.kernels.library import LibraryMissing
from localllm.kernels.ops.attention import Rows
from localllm.kernels.ops.attention import paged_attention as reference
from localllm.kernels.triton import attention as in_triton

DIM = 128
ROUNDS = 7
BEYOND_CACHE = 300_000_000  # bytes
MOST_SETS = 40
LEAST_CALLS = 4  # of a replay, which takes a while to start
READ = 1 << 31  # bytes
GOLDEN = 0.6180339887
TORCH = "flash", "cudnn"
FLASHINFER = "flashinfer", "flashinfer, tensor cores"

Call = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Case:
    lens: Sequence[tuple[int, int]]  # of each row: queries, context
    heads: int = 32
    kv_heads: int = 8
    window: int = 0
    page: int = 16

    def __str__(self) -> str:
        queries, context = self.lens[0]
        least, most = min(self.lens)[1], max(self.lens)[1]
        each = f"x {queries} of {context}" if least == most else f"of {least} to {most}"
        more = (f", window {self.window}" if self.window else "") + (f", pages of {self.page}" * (self.page != 16))
        return f"{len(self.lens)} {each}, {self.heads}/{self.kv_heads} heads{more}"

    @property
    def bytes(self) -> int:
        seen = [min(context, self.window + queries) if self.window else context for queries, context in self.lens]
        return 4 * DIM * self.kv_heads * sum(seen) + 4 * DIM * self.heads * sum(queries for queries, _ in self.lens)

    @property
    def operations(self) -> float:
        seen = (min(at + 1, self.window or at + 1) for queries, c in self.lens for at in range(c - queries, c))
        return 4.0 * DIM * self.heads * sum(seen)


def spread(rows: int, positions: int) -> list[tuple[int, int]]:
    """Rows with so many positions in all, from a tenth to nineteen tenths of their mean and in no order."""
    return [(1, round(positions / rows * (0.1 + 1.8 * (row * GOLDEN % 1)))) for row in range(rows)]


# What steps of the engine looked like while it served 256 requests at once, and fewer towards the end.
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
]
PROMPTS = [
    *(Case([(tokens, tokens)]) for tokens in (128, 512, 1024, 2048, 8192, 16384)),
    *(Case([(tokens, tokens)], heads=16) for tokens in (128, 1024, 8192, 16384)),
    Case([(8192, 8192)], page=64),
    Case([(512, 8192)]),
    *(Case([(1024, 8192)], window=window) for window in (0, 1024)),
    Case([(1024, 1024)] * 8),
    Case([(128, 128)] * 32),
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
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def bandwidth() -> float:
    """Bytes a microsecond, only read, by the fastest of several shapes of the same program."""
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
    """Operations a microsecond of a large bfloat16 product."""
    one, other = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    return 2.0 * 8192**3 / statistics.median([milliseconds(lambda: one @ other) for _ in range(ROUNDS + 1)][1:]) / 1e3


def inputs(case: Case) -> list[dict[str, Any]]:
    """Sets that share their rows, as layers do, and have a cache each."""
    needed = [-(-context // case.page) for _, context in case.lens]
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for own, ids in zip(table, (torch.randperm(sum(needed)) + 1).int().split(needed), strict=True):
        own[: len(ids)] = ids
    queries, contexts = zip(*case.lens, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    rows = Rows(starts, torch.tensor(contexts).int().cuda(), table.cuda(), queries, contexts)
    sets = []
    for _ in range(min(MOST_SETS, BEYOND_CACHE // case.bytes + 1)):
        cache = torch.randn(2, sum(needed) + 1, case.page, case.kv_heads, DIM, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(sum(queries), case.heads, DIM, device="cuda", dtype=torch.bfloat16)
        sets.append({"query": query, "key_pages": cache[0], "value_pages": cache[1], "rows": rows})
    return [{**one, "scale": DIM**-0.5, "window": case.window} for one in sets]


def peers(case: Case, sets: int) -> Mapping[str, list[Callable[[], object]]]:
    """torch's own attention, of keys and values that lie as it likes, where it can compute the case."""
    queries, context = case.lens[0]
    if case.window or len(set(case.lens)) > 1 or 1 < queries < context:
        return {}
    shape = len(case.lens), case.kv_heads, context, DIM
    data = [torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    query = torch.randn(shape[0], case.heads, queries, DIM, device="cuda", dtype=torch.bfloat16)

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
    """Microseconds of each, ours checked first."""
    sets = inputs(case)
    turns = -(-LEAST_CALLS // len(sets))
    expected = reference(**sets[0])
    calls: dict[str, Callable[[], None]] = {}
    for name, implementation in implementations.items():
        torch.testing.assert_close(implementation(**sets[0]), expected, rtol=2e-2, atol=2e-2)
        calls[name] = replays([lambda one=one, f=implementation: f(**one) for one in sets], turns)
    theirs = {**flashinfer_decode.decode(sets), **peers(case, len(sets))}
    for name, others in theirs.items():
        if name in FLASHINFER:
            torch.testing.assert_close(others[0](), expected, rtol=2e-2, atol=2e-2)
        try:
            calls[name] = replays(others, turns)
        except RuntimeError as error:  # no such implementation for this case
            print(f"{case}: {name}: {str(error)[:100]}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            times[name].append(milliseconds(call) * 1e3 / (turns * len(sets)))
    return {name: statistics.median(own[1:]) for name, own in times.items()}


def measure() -> Iterator[Row]:
    implementations: dict[str, Call] = {"triton": in_triton.paged_attention}
    try:
        from localllm.kernels.cuda import attention as in_cuda

        implementations = {"cuda": in_cuda.paged_attention, **implementations}
    except (LibraryMissing, AttributeError) as error:  # not built, or built without it
        print(error, file=sys.stderr)
    device = torch.cuda.get_device_name()
    read, rate = bandwidth(), product_rate()
    yield row("ceiling, read", read / 1e3, "GB/s", device=device, rounds=ROUNDS)
    yield row("ceiling, product", rate / 1e6, "TFLOP/s", device=device, rounds=ROUNDS)
    for kind in sys.argv[1:] or CASES:
        for case in CASES[kind]:
            times = timed(case, implementations)
            bound = max(case.bytes / read, case.operations / rate)
            for name in implementations:
                title = f"{kind}, {name}, {case}"
                beside = {**against("", TORCH, times, name), **against("flashinfer_", FLASHINFER, times, name)}
                share = bound / times[name]
                yield row(title, times[name], "µs", bound_share=share, device=device, rounds=ROUNDS, **beside)


def against(prefix: str, peers: Sequence[str], times: Mapping[str, float], name: str) -> dict[str, float]:
    """The fastest of the peers that were timed, and how many times as long it took."""
    best = min((times[peer] for peer in peers if peer in times), default=None)
    return {} if best is None else {f"{prefix}peer": round(best, 2), f"{prefix}ratio": round(best / times[name], 3)}


if __name__ == "__main__":
    save("cuda_attention", measure(), part=len(sys.argv) > 1)
