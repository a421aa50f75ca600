"""Chooses the captured steps that compute the shared expert beside the routed experts, on a second stream.

Both streams share the device, and a fork and a join take time. The gain depends on the sizes of the layer, the number
of tokens and the device, so it is measured for each number of tokens before the capture.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ....engine.errors import OutOfMemory
from ....kernels.ops.attention import Rows
from ....kernels.ops.mlp import Experts
from ....kernels.ops.step import Cache, LayerStep
from ....kernels.ops.streams import IN_ORDER, InOrder, Streams
from ..device import NO_ROWS, Captured, Device
from ..failures import failures

LAYERS = 4  # measured one after the other, so that the weights of a layer are not in the L2 cache
ROUNDS = 5
MIN_GAIN = 0.02  # share of the time of the experts that a second stream must gain
# Milliseconds that a second stream must gain in each layer. After graphs with a second stream, the kernels of all
# graphs of a process may start later (docs/benchmarks.md), so a smaller gain could be a loss.
MIN_LAYER_GAIN = 0.004


class SharedExperts(NamedTuple):
    """The layers of a model that have routed experts and a shared expert."""

    mlps: Sequence[Experts]
    hidden: int
    dtype: torch.dtype  # of activations


Timer = Callable[[ModuleType, Captured], float]


def milliseconds(module: ModuleType, replay: Captured) -> float:
    """Milliseconds of a replay on the device. `module`: Device.module."""
    start = module.Event(enable_timing=True)
    end = module.Event(enable_timing=True)
    start.record()
    replay(NO_ROWS)
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


class ParallelExperts:
    """The streams of captured steps. A second stream never runs without a graph."""

    def __init__(self, device: Device, experts: SharedExperts | None, timer: Timer = milliseconds) -> None:
        self._device = device
        self._experts = experts
        self._timer = timer
        self._chosen: dict[int, Streams] = {}

    def streams(self, tokens: int) -> Streams:
        """The streams of captured steps of `tokens` tokens: those of the device if its second stream gains time."""
        if self._experts is None:
            return IN_ORDER
        if tokens not in self._chosen:
            self._chosen[tokens] = self._fastest(tokens, self._experts)
        return self._chosen[tokens]

    def second_queue_tokens(self) -> tuple[int, ...]:
        """The numbers of tokens whose captured steps use a second stream."""
        return tuple(sorted(tokens for tokens, streams in self._chosen.items() if streams is not IN_ORDER))

    def close(self) -> None:
        """Drop the references to weights."""
        self._experts = None

    def _fastest(self, tokens: int, experts: SharedExperts) -> Streams:
        """The fastest streams for a number of tokens. A second stream must gain MIN_GAIN and MIN_LAYER_GAIN."""
        second_queue = self._device.streams()
        if isinstance(second_queue, InOrder):
            return IN_ORDER
        candidates = [IN_ORDER, second_queue, self._device.streams(after_router=True)]
        times = self._measured(tokens, experts, candidates)
        if not times:
            return IN_ORDER
        fastest = min(range(len(candidates)), key=times.__getitem__)
        gain = times[0] - times[fastest]
        layers = min(LAYERS, len(experts.mlps))
        return candidates[fastest] if gain >= max(MIN_GAIN * times[0], MIN_LAYER_GAIN * layers) else IN_ORDER

    @torch.inference_mode()
    def _measured(self, tokens: int, experts: SharedExperts, candidates: Sequence[Streams]) -> list[float]:
        """Milliseconds of the experts of some layers with each of the candidates. Empty if memory is short."""
        device = self._device
        assert device.recorder is not None
        recorder = device.recorder()  # a memory pool without captures cannot be used again
        generator = torch.Generator(device.type).manual_seed(0)
        shape = tokens, experts.hidden
        with suppress(OutOfMemory), failures("measuring a second stream failed"), recorder.session():
            inputs = [
                torch.randn(shape, generator=generator, device=device.type, dtype=experts.dtype)
                for _ in experts.mlps[:LAYERS]
            ]
            # The first call compiles, loads and allocates, which a capture does not allow.
            self._run(experts, inputs, IN_ORDER)
            replays = []
            for streams in candidates:
                recorder.begin()
                self._run(experts, inputs, streams)
                replays.append(recorder.end())
            rounds = [[self._timer(device.module, replay) for replay in replays] for _ in range(ROUNDS + 1)]
            return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]
        return []

    def _run(self, experts: SharedExperts, inputs: Sequence[Tensor], streams: Streams) -> None:
        """Compute the MLPs of some layers, each for its own inputs [tokens, hidden].

        A step may fuse the router with the norm before it. It then forks after the router, whichever fork was chosen.
        """
        empty = torch.empty(0, dtype=torch.int32, device=self._device.type)
        rows = Rows(empty, empty, empty.view(0, 0), (), ())
        step = LayerStep(rows, empty, (), Cache((), ()), streams=streams)
        for mlp, x in zip(experts.mlps, inputs, strict=False):
            mlp(x, self._device.ops, step)
