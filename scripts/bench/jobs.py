"""Measurements of a model on a device: steps, idle times between steps, prompts, and many requests in parallel."""

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
from kernel_times import step_time
from rows import Row
from shapes import Shape
from stepping import Stepped

from localllm.engine.request import Sampling
from localllm.engine.runner import RunnerSpec

SWEEP_LENGTHS = 40
TOLERANCE = 0.01  # a way that is slower by more is measured again
REPEAT_ROUNDS = 3  # times as many rounds then
MIN_TOKENS = 100  # in and out of a request of random length
RESAMPLES = 2000  # for the confidence interval of a median


class Peer(Protocol):
    """Another program on the same device."""

    label: str

    def steps(self, rows: int, context: int, count: int) -> float: ...

    def first_token(self, length: int) -> float: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PeakRates:
    """Peak rates per second; 0: not measured."""

    read: float = 0.0  # bytes
    multiply: float = 0.0  # operations on bfloat16


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters of the jobs. All ways are compared with the last one."""

    shape: Shape
    row: Callable[..., Row]  # rows.row; it adds shape and format to the name
    ways: Sequence[Stepped] = ()
    peer: Peer | None = None
    peaks: PeakRates = PeakRates()
    has_trace: bool = False  # the profiler supports the device
    rounds: int = 6
    cells: Sequence[tuple[int, int]] = ()  # rows and context
    steps: int = 32
    lengths: Sequence[int] = ()
    max_length: int = 16_000  # of a sweep
    requests: int = 256
    max_tokens: int = 1024  # tokens in and out of each request
    runs: int = 2  # repetitions with all requests
    sampling: Sampling = field(default_factory=Sampling)


def alternate(measurements: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each measurement in each round. The order alternates (A B B A), after a warm-up."""
    for measure in measurements.values():
        measure()
    times: dict[str, list[float]] = {label: [] for label in measurements}
    order = list(measurements)
    for _ in range(rounds):
        for label in order:
            times[label].append(measurements[label]())
        order.reverse()
    return times


class Ratio(NamedTuple):
    """The median ratio of two times over all rounds, with its 95 % interval (bootstrap); above 1: faster."""

    median: float
    low: float
    high: float


def speed_ratio(times: Sequence[float], others: Sequence[float]) -> Ratio:
    """`others` divided by `times`."""
    ratios = np.array(others) / np.array(times)
    samples = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def _ms(times: Sequence[float]) -> float:
    """The median in milliseconds."""
    return round(1e3 * statistics.median(times), 4)


def figures(
    setting: Setting, name: str, times: Mapping[str, list[float]], bounds: Mapping[str, float], **more: object
) -> Iterator[Row]:
    """A row for each way, in milliseconds, compared with the peer, or with the last way if there is no peer."""
    last = setting.ways[-1].label
    for way in setting.ways:
        seconds = times[way.label]
        against = last
        if setting.peer is not None and setting.peer.label in times:
            against = setting.peer.label
        facts: dict[str, object] = {"rounds": len(seconds), "spread": spread(seconds), **more}
        if against != way.label:
            ratio = speed_ratio(seconds, times[against])
            facts |= {"peer": _ms(times[against]), "against": against, "ratio": ratio.median}
            facts["interval"] = [round(ratio.low, 3), round(ratio.high, 3)]
        if last not in (way.label, against):
            facts[f"ratio to {last}"] = round(speed_ratio(seconds, times[last]).median, 3)
        if bounds[way.label]:
            facts["bound_share"] = bounds[way.label] / statistics.median(seconds)
        yield setting.row(f"{name}, {way.label}", 1e3 * statistics.median(seconds), "ms", **facts)


def spread(times: Sequence[float]) -> float:
    """Interquartile range as a share of the median."""
    low, middle, high = np.percentile(times, [25, 50, 75])
    return round(float((high - low) / middle), 3)


def decode(setting: Setting) -> Iterator[Row]:
    """The time of one decode step; `alone` is the time of the runner without the engine."""
    for rows, context in setting.cells:
        yield from _decode(setting, rows, context)


def _decode(setting: Setting, rows: int, context: int) -> Iterator[Row]:
    count = setting.steps
    read = setting.peaks.read
    alone: dict[str, list[float]] = {way.label: [] for way in setting.ways}
    bounds = dict.fromkeys(alone, 0.0)

    def timed(way: Stepped) -> float:
        way.steady(rows, context, count)
        seconds = way.steps(count)
        bounds[way.label] = step_bytes(way.spec, rows * way.mean_context(count)) / read if read else 0.0
        alone[way.label].append(way.alone(count))
        return seconds

    measurements: dict[str, Callable[[], float]] = {way.label: partial(timed, way) for way in setting.ways}
    if setting.peer is not None:
        measurements[setting.peer.label] = partial(setting.peer.steps, rows, context, count)
    times = alternate(measurements, setting.rounds)
    for way, figure in zip(setting.ways, figures(setting, _cell(rows, context), times, bounds), strict=True):
        per_second = rows / statistics.median(times[way.label])
        yield figure | {"alone": _ms(alone[way.label][1:]), "tokens_per_second": round(per_second, 1)}


def step_bytes(spec: RunnerSpec, context: float) -> float:
    """The bytes that a step must read: weights, and the keys and values of `context` tokens, over all rows."""
    return spec.token_bytes + context * spec.cache_bytes / spec.cache_tokens


def between_steps(setting: Setting) -> Iterator[Row]:
    """The share of time in percent in which the device is idle: between steps (`ours`), and between kernels of a step.

    Steps are told apart by the copy of a step's inputs. Tracing slows the host, so the real idle time is shorter."""
    if not setting.has_trace:
        print("idle: the profiler does not support this device, not measured", file=sys.stderr)
        return
    for rows, context in setting.cells:
        for way in setting.ways:
            yield _between_steps(setting, way, rows, context)


def _between_steps(setting: Setting, way: Stepped, rows: int, context: int) -> Row:
    count = setting.steps
    way.steady(rows, context, 3 * count)
    seconds = statistics.median(way.steps(count // 2) for _ in range(3))
    trace = traced(lambda: way.steps(count))
    shares = idle(trace)
    busy = (max(work.stop for work in trace) - trace[0].start) * (1 - shares.between - shares.within) / count
    return setting.row(
        f"idle between steps, {_cell(rows, context)}, {way.label}",
        100 * shares.between,
        "%",
        rounds=1,
        within_steps=round(100 * shares.within, 2),
        busy=round(1e3 * busy, 3),
        step=round(1e3 * seconds, 3),
        not_busy=round(100 * (1 - busy / seconds), 2),
    )


def kernels(setting: Setting) -> Iterator[Row]:
    """The time of each kernel in a decode step: milliseconds and launches by name. `ours`: all kernels and copies."""
    if not setting.has_trace:
        print("kernels: the profiler does not support this device, not measured", file=sys.stderr)
        return
    count = setting.steps
    for rows, context in setting.cells:
        for way in setting.ways:
            way.steady(rows, context, 2 * count)
            seconds = way.steps(count)
            busy, gaps, slowest = step_time(traced(partial(way.steps, count)), count)
            facts = {"gaps": round(gaps, 4), "step": round(1e3 * seconds, 4), "kernels": slowest}
            yield setting.row(f"kernels of a step, {_cell(rows, context)}, {way.label}", busy, "ms", rounds=1, **facts)


def prefill(setting: Setting) -> Iterator[Row]:
    """The time from a prompt to its first token."""
    for length in setting.lengths:
        times = alternate(_first_tokens(setting, length), setting.rounds)
        name = f"first token of a prompt of {length}"
        yield from figures(setting, name, times, dict.fromkeys(times, _prefill_bound(setting, [length])), length=length)


def sweep(setting: Setting) -> Iterator[Row]:
    """The time to the first token at many lengths: for each way the worst ratio to the last way.

    Lengths at which a way is slower by more than TOLERANCE are measured again with more rounds; only these count."""
    *ways, last = setting.ways

    def measure(lengths: Sequence[int], rounds: int) -> dict[int, dict[str, list[float]]]:
        return {length: alternate(_first_tokens(setting, length, peer=False), rounds) for length in lengths}

    def is_slow(seconds: Mapping[str, Sequence[float]]) -> bool:
        return any(speed_ratio(seconds[way.label], seconds[last.label]).median < 1 - TOLERANCE for way in ways)

    times = measure(sweep_lengths(setting.max_length), setting.rounds)
    again = [length for length, seconds in times.items() if is_slow(seconds)]
    times |= measure(again, REPEAT_ROUNDS * setting.rounds)
    for way in ways:
        ratios = {length: speed_ratio(seconds[way.label], seconds[last.label]) for length, seconds in times.items()}
        length, worst = min(ratios.items(), key=lambda item: item[1].median)
        yield setting.row(
            f"first token at {len(times)} lengths, {way.label}: the worst ratio to {last.label}",
            worst.median,
            "ratio",
            length=length,
            interval=[round(worst.low, 3), round(worst.high, 3)],
            rounds=setting.rounds,
            again={"lengths": again, "rounds": REPEAT_ROUNDS * setting.rounds},
            ratios={length: round(ratio.median, 3) for length, ratio in ratios.items()},
        )


def sweep_lengths(max_length: int) -> list[int]:
    """Different lengths from 1 to `max_length`, in a geometric series as far as integers allow."""
    count = min(SWEEP_LENGTHS, max_length)
    points = count
    while len(lengths := np.unique(np.geomspace(1, max_length, points).round().astype(int))) < count:
        points += 1
    return [int(length) for length in lengths]


def mixed(setting: Setting) -> Iterator[Row]:
    """nano-vllm's benchmark: all requests in parallel, with random lengths from MIN_TOKENS on."""
    prompts, counts = random_requests(setting.requests, setting.max_tokens)
    name = f"{setting.requests} requests of {min(MIN_TOKENS, setting.max_tokens)} to {setting.max_tokens} in and out"
    yield from _many(setting, name, prompts, counts)


def random_requests(requests: int, max_tokens: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """(prompts, number of tokens to generate for each). Seed and order of the draws are those of nano-vllm: for 256
    requests of up to 1,024 tokens, 142,827 tokens in and 133,966 out."""
    ints = random.Random(0)
    min_tokens = min(MIN_TOKENS, max_tokens)
    prompts: list[tuple[int, ...]] = []
    for _ in range(requests):
        length = ints.randint(min_tokens, max_tokens)
        prompts.append(tuple(ints.randint(0, 10_000) for _ in range(length)))
    return prompts, [ints.randint(min_tokens, max_tokens) for _ in range(requests)]


def even(setting: Setting) -> Iterator[Row]:
    """Many requests in parallel, all of one length."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, setting.shape.vocab, (setting.requests, setting.max_tokens)).tolist()
    counts = [setting.max_tokens] * setting.requests
    yield from _many(
        setting, f"{setting.requests} requests of {setting.max_tokens} in and out", [*map(tuple, prompts)], counts
    )


def _many(setting: Setting, name: str, prompts: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Iterator[Row]:
    """Tokens per second. Prompts differ from run to run, so that no prefix is cached."""
    vocab = setting.shape.vocab
    seconds: dict[str, list[float]] = {way.label: [] for way in setting.ways}
    steps: dict[str, int] = {}

    def prompts_of(number: int) -> list[tuple[int, ...]]:
        return [tuple((token + number) % vocab for token in prompt) for prompt in prompts]

    for way in setting.ways:  # a short warm-up
        some = max(1, len(prompts) // 4)
        way.throughput(prompts_of(setting.runs)[:some], [min(4, count) for count in counts[:some]], setting.sampling)
    for number in range(setting.runs):
        for way in setting.ways if number % 2 == 0 else reversed(setting.ways):
            result = way.throughput(prompts_of(number), counts, setting.sampling)
            seconds[way.label].append(result.seconds)
            steps[way.label] = result.steps
    for way in setting.ways:
        median = statistics.median(seconds[way.label])
        bound = _bound(setting, way.spec, [*map(len, prompts)], counts)
        yield setting.row(
            f"{name}, {way.label}",
            sum(counts) / median,
            "tokens/s",
            bound_share=bound / median if bound else None,
            seconds=round(median, 2),
            floor=round(bound, 2),
            steps=steps[way.label],
            runs=setting.runs,
            temperature=setting.sampling.temperature,
        )


def _bound(setting: Setting, spec: RunnerSpec, prompts: Sequence[int], outputs: Sequence[int]) -> float:
    """The minimum time in seconds for requests with these numbers of tokens.

    It has two phases: all prompts at the peak rate of operations, then decode of all rows in parallel at the peak read
    rate. Each step of decode reads the weights once, and the keys and values of all rows."""
    if not setting.peaks.read:
        return 0.0
    context = sum(out * length + out * (out - 1) // 2 for length, out in zip(prompts, outputs, strict=True))
    read = max(outputs) * spec.token_bytes + context * spec.cache_bytes / spec.cache_tokens
    return read / setting.peaks.read + _prefill_bound(setting, prompts)


def _prefill_bound(setting: Setting, lengths: Sequence[int]) -> float:
    """Seconds for the operations of prompts at the peak rate; 0 if the rate was not measured."""
    operations = sum(map(setting.shape.operations, lengths))
    return operations / setting.peaks.multiply if setting.peaks.multiply else 0.0


def _first_tokens(setting: Setting, length: int, *, peer: bool = True) -> dict[str, Callable[[], float]]:
    programs: list[Stepped | Peer] = [*setting.ways]
    if peer and setting.peer is not None:
        programs.append(setting.peer)
    return {program.label: partial(program.first_token, length) for program in programs}


def _cell(rows: int, context: int) -> str:
    return f"decode, {rows} row{'s' * (rows > 1)} of {context} tokens"


JOBS: Mapping[str, Callable[[Setting], Iterator[Row]]] = {
    "decode": decode,
    "idle": between_steps,
    "kernels": kernels,
    "prefill": prefill,
    "sweep": sweep,
    "mixed": mixed,
    "even": even,
}
