"""What is measured of a model on a device: steps, what happens between them, prompts, and many requests at once."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from idle import idle, traced
from rows import Row
from shapes import Shape
from stepping import Stepped

from localllm.engine.request import Sampling
from localllm.engine.runner import RunnerSpec

SWEPT = 40  # lengths of a sweep
SLOWER = 0.01  # that a way may be at any of them
LONGER = 5  # times as many rounds, where it seems to be
LEAST = 100  # tokens in and out of a request of random length
RESAMPLED = 2000  # times, for the interval of a median


class Peer(Protocol):
    """Another program on the same device."""

    label: str

    def steps(self, rows: int, context: int, count: int) -> float: ...

    def first_token(self, length: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Per second; 0 where it was not measured."""

    read: float = 0.0  # bytes
    multiply: float = 0.0  # operations on bfloat16


@dataclass(frozen=True, slots=True)
class Setting:
    """What the jobs are done with. The last of the ways is what the others are compared with."""

    shape: Shape
    row: Callable[..., Row]  # as rows.row, the name without shape and format
    ways: Sequence[Stepped] = ()
    peer: Peer | None = None
    ceilings: Ceilings = Ceilings()
    has_trace: bool = False  # the device says when it worked
    rounds: int = 6
    cells: Sequence[tuple[int, int]] = ()  # rows and context
    steps: int = 32
    lengths: Sequence[int] = ()
    longest: int = 16_000  # of a sweep
    requests: int = 256
    most: int = 1024  # tokens in and out of each
    runs: int = 2  # of all requests
    sampling: Sampling = field(default_factory=Sampling)


def turns(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round: they take turns, A B B A, after one turn that does not count."""
    for timed in contestants.values():
        timed()
    times: dict[str, list[float]] = {label: [] for label in contestants}
    for number in range(rounds):
        for label in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            times[label].append(contestants[label]())
    return times


class Compared(NamedTuple):
    """How much faster: the median over rounds, and the 95 % interval of it (bootstrap)."""

    ratio: float
    low: float
    high: float


def compared(own: Sequence[float], others: Sequence[float]) -> Compared:
    ratios = np.array(others) / np.array(own)
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Compared(float(np.median(ratios)), float(low), float(high))


def _ms(times: Sequence[float]) -> float:
    """The median."""
    return round(1e3 * statistics.median(times), 4)


def figures(
    setting: Setting, name: str, times: Mapping[str, list[float]], floors: Mapping[str, float], **more: object
) -> Iterator[Row]:
    """A row for each way, in milliseconds: beside the peer, or else the last way."""
    last = setting.ways[-1].label
    for way in setting.ways:
        own = times[way.label]
        against = setting.peer.label if setting.peer is not None and setting.peer.label in times else last
        facts: dict[str, object] = {"rounds": len(own), "spread": spread(own), **more}
        if against != way.label:
            found = compared(own, times[against])
            facts |= {"peer": _ms(times[against]), "against": against, "ratio": found.ratio}
            facts["interval"] = [round(found.low, 3), round(found.high, 3)]
        if last not in (way.label, against):
            facts[f"ratio to {last}"] = round(compared(own, times[last]).ratio, 3)
        if floors[way.label]:
            facts["bound_share"] = floors[way.label] / statistics.median(own)
        yield setting.row(f"{name}, {way.label}", 1e3 * statistics.median(own), "ms", **facts)


def spread(times: Sequence[float]) -> float:
    """Interquartile range as a share of the median."""
    low, middle, high = np.percentile(times, [25, 50, 75])
    return round(float((high - low) / middle), 3)


def decode(setting: Setting) -> Iterator[Row]:
    """One step of rows that all decode; `alone` is the runner's without the engine."""
    for rows, context in setting.cells:
        yield from _decode(setting, rows, context)


def _decode(setting: Setting, rows: int, context: int) -> Iterator[Row]:
    count, read = setting.steps, setting.ceilings.read
    alone: dict[str, list[float]] = {way.label: [] for way in setting.ways}
    floors = dict.fromkeys(alone, 0.0)

    def timed(way: Stepped) -> float:
        way.steady(rows, context, count)
        seconds = way.steps(count)
        floors[way.label] = step_bytes(way.spec, rows * way.mean_context(count)) / read if read else 0.0
        alone[way.label].append(way.alone(count))
        return seconds

    contestants: dict[str, Callable[[], float]] = {way.label: partial(timed, way) for way in setting.ways}
    if setting.peer is not None:
        contestants[setting.peer.label] = partial(setting.peer.steps, rows, context, count)
    times = turns(contestants, setting.rounds)
    for way, made in zip(setting.ways, figures(setting, _cell(rows, context), times, floors), strict=True):
        per_second = rows / statistics.median(times[way.label])
        yield made | {"alone": _ms(alone[way.label][1:]), "tokens_per_second": round(per_second, 1)}


def step_bytes(spec: RunnerSpec, context: float) -> float:
    """What a step must read: weights, and keys and values of `context` tokens of all rows."""
    return spec.token_bytes + context * spec.cache_bytes / spec.cache_tokens


def between_steps(setting: Setting) -> Iterator[Row]:
    """The share of the time that the device waits, in percent: around the copy of a step's numbers (`ours`), and
    between kernels of one step. Tracing costs the host time, so the waiting is if anything less."""
    if not setting.has_trace:
        print("idle: this device does not say when it works, not measured", file=sys.stderr)
        return
    for rows, context in setting.cells:
        for way in setting.ways:
            yield _between_steps(setting, way, rows, context)


def _between_steps(setting: Setting, way: Stepped, rows: int, context: int) -> Row:
    count = setting.steps
    way.steady(rows, context, 3 * count)
    seconds = statistics.median(way.steps(count // 2) for _ in range(3))
    trace = traced(lambda: way.steps(count))
    found = idle(trace)
    busy = (max(work.stop for work in trace) - trace[0].start) * (1 - found.between - found.within) / count
    return setting.row(
        f"idle between steps, {_cell(rows, context)}, {way.label}",
        100 * found.between,
        "%",
        rounds=1,
        within_steps=round(100 * found.within, 2),
        busy=round(1e3 * busy, 3),
        step=round(1e3 * seconds, 3),
        not_busy=round(100 * (1 - busy / seconds), 2),
    )


def prefill(setting: Setting) -> Iterator[Row]:
    """From a prompt to its first token."""
    for length in setting.lengths:
        times = turns(_first_tokens(setting, length), setting.rounds)
        name = f"first token of a prompt of {length}"
        yield from figures(setting, name, times, dict.fromkeys(times, _reading(setting, [length])), length=length)


def sweep(setting: Setting) -> Iterator[Row]:
    """The same at many lengths, of each way against the last one: the worst of them is what is told. Where a way seems
    slower by more than is allowed, only what another look finds counts, which is longer."""
    *ways, last = setting.ways

    def look(lengths: Sequence[int], rounds: int) -> dict[int, dict[str, list[float]]]:
        return {length: turns(_first_tokens(setting, length, peer=False), rounds) for length in lengths}

    def seems_slower(found: Mapping[str, Sequence[float]]) -> bool:
        return any(compared(found[way.label], found[last.label]).ratio < 1 - SLOWER for way in ways)

    times = look(swept(setting.longest), setting.rounds)
    again = [length for length, found in times.items() if seems_slower(found)]
    times |= look(again, LONGER * setting.rounds)
    for way in ways:
        found = {length: compared(one[way.label], one[last.label]) for length, one in times.items()}
        length, worst = min(found.items(), key=lambda each: each[1].ratio)
        yield setting.row(
            f"first token at {len(times)} lengths, {way.label}: the worst ratio to {last.label}",
            worst.ratio,
            "ratio",
            length=length,
            interval=[round(worst.low, 3), round(worst.high, 3)],
            rounds=setting.rounds,
            again={"lengths": again, "rounds": LONGER * setting.rounds},
            ratios={length: round(one.ratio, 3) for length, one in found.items()},
        )


def swept(longest: int) -> list[int]:
    """Lengths from 1 on, each about as much longer than the one before."""
    count = min(SWEPT, longest)
    points = count
    while len(lengths := np.unique(np.geomspace(1, longest, points).round().astype(int))) < count:
        points += 1
    return [int(length) for length in lengths]


def mixed(setting: Setting) -> Iterator[Row]:
    """nano-vllm's benchmark: lengths from 100 on at random, all requests at once."""
    prompts, counts = at_random(setting.requests, setting.most)
    name = f"{setting.requests} requests of {min(LEAST, setting.most)} to {setting.most} in and out"
    yield from _many(setting, name, prompts, counts)


def at_random(requests: int, most: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Prompts, and how many tokens each is to give; its seed and order of drawing are nano-vllm's, so that 256 of up
    to 1,024 are 142,827 tokens in and 133,966 out."""
    ints, least = random.Random(0), min(LEAST, most)
    prompts = [tuple(ints.randint(0, 10_000) for _ in range(ints.randint(least, most))) for _ in range(requests)]
    return prompts, [ints.randint(least, most) for _ in range(requests)]


def even(setting: Setting) -> Iterator[Row]:
    """All of one length."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, setting.shape.vocab, (setting.requests, setting.most)).tolist()
    counts = [setting.most] * setting.requests
    yield from _many(setting, f"{setting.requests} requests of {setting.most} in and out", [*map(tuple, drawn)], counts)


def _many(setting: Setting, name: str, prompts: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Iterator[Row]:
    """Tokens per second, and the seconds of all; prompts differ from run to run, so that no prefix is known."""
    vocab = setting.shape.vocab
    seconds: dict[str, list[float]] = {way.label: [] for way in setting.ways}
    steps: dict[str, int] = {}

    def asked(number: int) -> list[tuple[int, ...]]:
        return [tuple((token + number) % vocab for token in prompt) for prompt in prompts]

    for way in setting.ways:  # not counted, and short
        some = max(1, len(prompts) // 4)
        way.throughput(asked(setting.runs)[:some], [min(4, count) for count in counts[:some]], setting.sampling)
    for number in range(setting.runs):
        for way in setting.ways if number % 2 == 0 else reversed(setting.ways):
            found = way.throughput(asked(number), counts, setting.sampling)
            seconds[way.label].append(found.seconds)
            steps[way.label] = found.steps
    for way in setting.ways:
        median = statistics.median(seconds[way.label])
        floor = _floor(setting, way.spec, [*map(len, prompts)], counts)
        yield setting.row(
            f"{name}, {way.label}",
            sum(counts) / median,
            "tokens/s",
            bound_share=floor / median if floor else None,
            seconds=round(median, 2),
            floor=round(floor, 2),
            steps=steps[way.label],
            runs=setting.runs,
            temperature=setting.sampling.temperature,
        )


def _floor(setting: Setting, spec: RunnerSpec, ins: Sequence[int], outs: Sequence[int]) -> float:
    """Seconds: prompts at the rate of a product, then all rows side by side, the weights read once for each token of
    the longest and every key and value once for each token after it."""
    if not setting.ceilings.read:
        return 0.0
    context = sum(out * length + out * (out - 1) // 2 for length, out in zip(ins, outs, strict=True))
    read = max(outs) * spec.token_bytes + context * spec.cache_bytes / spec.cache_tokens
    return read / setting.ceilings.read + _reading(setting, ins)


def _reading(setting: Setting, lengths: Sequence[int]) -> float:
    """Seconds that prompts take at the rate of a product; 0 where that is not known."""
    operations = sum(map(setting.shape.operations, lengths))
    return operations / setting.ceilings.multiply if setting.ceilings.multiply else 0.0


def _first_tokens(setting: Setting, length: int, *, peer: bool = True) -> dict[str, Callable[[], float]]:
    everyone: list[Stepped | Peer] = [*setting.ways]
    if peer and setting.peer is not None:
        everyone.append(setting.peer)
    return {one.label: partial(one.first_token, length) for one in everyone}


def _cell(rows: int, context: int) -> str:
    return f"decode, {rows} row{'s' * (rows > 1)} of {context} tokens"


JOBS: Mapping[str, Callable[[Setting], Iterator[Row]]] = {
    "decode": decode,
    "idle": between_steps,
    "prefill": prefill,
    "sweep": sweep,
    "mixed": mixed,
    "even": even,
}
