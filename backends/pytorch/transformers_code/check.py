"""Compares our steps of a tiny model of the same class with transformers' own forward pass, before a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....engine.errors import ModelRefused
from ....engine.files.model_files import read_model
from ....engine.options import LoadOptions
from ....kernels.ops import Ops
from ....kernels.ops.attention import Attention, Rows
from ..device import Device
from ..inputs import Step
from ..kv import GroupedKV, PagedKV
from ..loading import Loader
from .classes import causal_class, config_of, refused
from .describe import describe
from .model import TransformersModel, build
from .twin import tiny_values

PAGE = 4
PAGES = 16
LENGTHS = (21, 13)
SEED = 11
BOUND = 1e-3  # largest error of a logit, as a share of the largest logit
# Steps of rows (sequence, first token, end): chunks of both sequences, single tokens, and both together.
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 9), (1, 0, 1)),
    ((1, 1, 12),),
    ((0, 9, 10), (1, 12, 13)),
    ((0, 10, 21),),
)
_DEVICE = Device("cpu", "cpu", torch.cpu, Ops(), dtype=torch.float32)


@dataclass(frozen=True)
class Verdict:
    """The result of a check that passed."""

    error: float  # largest error of a logit, as a share of the largest logit
    fused: bool  # whether our norms and MLPs may replace those of the class
    is_capturable: bool  # whether a graph can capture a step: its code reads no values on the host


def check(config: Any) -> Verdict:
    """Compare our steps of a tiny model of a class with transformers'. `config`: of transformers, of any size. Raises
    ModelRefused if they differ."""
    model_type = config.model_type
    try:
        values = tiny_values(config.to_dict(), int(config.num_hidden_layers))
        tiny = config_of({**values, "model_type": model_type})
        with TemporaryDirectory() as folder:
            expected = _reference(tiny, Path(folder))
            verdicts = [_verdict(expected, Path(folder), fused=True)]
            if verdicts[0].error > BOUND:
                verdicts.append(_verdict(expected, Path(folder), fused=False))
    except ModelRefused:
        raise
    except Exception as error:  # any code of transformers may run here
        raise refused(model_type, f"its check failed ({type(error).__name__}: {error!s:.200})") from error
    if not verdicts[-1].error <= BOUND:
        raise refused(model_type, f"steps over our cache differ from its own by {verdicts[-1].error:.1e} of the logits")
    return verdicts[-1]


def _verdict(expected: list[Tensor], folder: Path, *, fused: bool) -> Verdict:
    actual, is_capturable = _ours(folder, fused=fused)
    errors = [float((one - right).abs().max() / right.abs().max()) for one, right in zip(actual, expected, strict=True)]
    return Verdict(max(errors), fused, is_capturable)


def _prompts(vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(vocab, (length,), generator=generator) for length in LENGTHS]


def _reference(config: Any, folder: Path) -> list[Tensor]:
    """Save a tiny random model -> its logits [tokens, vocab] of each prompt."""
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(SEED)
        model = causal_class(config.model_type)(config).float().eval()
        for value in model.state_dict().values():
            if value.is_floating_point():
                scale = 1.5 / value.shape[-1] ** 0.5 if value.dim() > 1 else 0.2
                value.copy_(torch.randn(value.shape) * scale + (value if value.dim() == 1 else 0.0))
        model.tie_weights()
        model.save_pretrained(folder)
        return [model(prompt.unsqueeze(0), use_cache=False).logits[0] for prompt in _prompts(config.vocab_size)]


def _ours(folder: Path, *, fused: bool) -> tuple[list[Tensor], bool]:
    """(logits [tokens, vocab] of each prompt of the model in `folder`, in STEPS; Verdict.is_capturable)."""
    description = replace(describe(read_model(folder)), fused=fused)
    loader = Loader(description.files, LoadOptions(), _DEVICE, torch.float32)
    config = description.files.config
    with torch.inference_mode():
        model, _ = loader.load(lambda weights: build(description, weights), 0)
        heads, dim = config.cache_shape[1:]
        pages = PagedKV(config.num_layers, PAGES, PAGE, heads, (dim, dim), torch.float32, "cpu")
        pages.clear()
        kv = GroupedKV([pages], [0], [0] * config.num_layers, [0] * config.num_layers)
        logits: list[list[Tensor]] = [[] for _ in LENGTHS]
        for rows in STEPS:
            for (row, _, _), part in zip(rows, _run(model, kv, rows, config.vocab_size), strict=True):
                logits[row].append(part)
        # Our own attention is not captured here.
        ops = replace(_DEVICE.ops, attention=Attention(paged=lambda query, *_: torch.zeros_like(query)))
        step, _ = _step(STEPS[-2], config.vocab_size)
        reads = _HostReads()  # type: ignore[no-untyped-call]
        with reads:
            model.logits(model(step, ops, kv), ops)
    return [torch.cat(parts) for parts in logits], not reads.found


class _HostReads(TorchDispatchMode):
    """Notes the first op that a graph cannot capture: one that reads values on the host, or copies them from there."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _UNCAPTURED and not self.found:
            self.found = name
        return func(*args, **(kwargs or {}))


_UNCAPTURED = frozenset(
    "_local_scalar_dense nonzero is_nonzero masked_select equal unique_dim _unique2 lift_fresh".split()
)


def _run(
    model: TransformersModel, kv: GroupedKV, rows: Sequence[tuple[int, int, int]], vocab: int
) -> tuple[Tensor, ...]:
    """Compute a step -> the logits [tokens, vocab] of each row."""
    step, lens = _step(rows, vocab)
    logits: tuple[Tensor, ...] = model.logits(model(step, _DEVICE.ops, kv), _DEVICE.ops).split(lens)
    return logits


def _step(rows: Sequence[tuple[int, int, int]], vocab: int) -> tuple[Step, list[int]]:
    """(the step, the number of tokens of each row)."""
    prompts = _prompts(vocab)
    tokens = torch.cat([prompts[row][start:end] for row, start, end in rows]).int()
    positions = torch.cat([torch.arange(start, end) for _, start, end in rows])
    # Pages of both sequences alternate.
    tables = torch.arange(1, PAGES + 1).view(-1, len(LENGTHS)).T
    table = torch.stack([tables[row] for row, _, _ in rows]).int()
    lens = [end - start for _, start, end in rows]
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lens))
    slots = table[owner, positions // PAGE].long() * PAGE + positions % PAGE
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    contexts = tuple(end for _, _, end in rows)
    packed = Rows(starts, torch.tensor(contexts).int(), table, tuple(lens), contexts)
    return Step(tokens, positions.int(), slots, torch.arange(len(tokens)).int(), packed), lens
