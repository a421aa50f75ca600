"""A decoder layer as one op, and all of a model's. What they mean is their parts one after the other; a device may do
them in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .attention import Rows
from .case import Case
from .kv import Rotation
from .projection import Product, Projection

if TYPE_CHECKING:
    from . import Ops

Gate = Literal["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]  # a field of Activation


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norm, attention, norm, gated MLP; some normalise what each block adds as well. Norms are [hidden]."""

    before_attention: Tensor
    before_mlp: Tensor
    after_attention: Tensor | None  # both or none
    after_mlp: Tensor | None
    query_norm: Tensor | None  # [dim], both or none
    key_norm: Tensor | None
    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    gate: Gate
    rotation: Rotation
    dim: int  # of a head
    eps: float
    offset: float  # of every norm's weight
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None


class Last(NamedTuple):
    """The tokens of which anything is read behind the last layer: of all others it makes keys and values only."""

    tokens: Tensor  # [answers] int32
    rows: Rows  # theirs, of one query each


def prepare(layer: DecoderLayer) -> Any:
    """The layer as this device's `decoder` wants it; here: as it is."""
    return layer


def decoder(
    ops: Ops,
    layer: DecoderLayer,
    x: Tensor,
    stream: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    last: Last | None = None,
) -> tuple[Tensor, Tensor]:
    """(x, stream), both [tokens, hidden] -> the layer's own; x is what is still to be added to the residual stream.

    The other arguments are those of kv.append and attention.paged, whose cache it writes and reads. With `last` the
    answers are of those tokens alone. An implementation may write over x and stream.
    """
    norm = ops.norm
    x, stream = norm.add_rms(x, stream, layer.before_attention, layer.eps, layer.offset)
    qkv = layer.qkv(x, ops).view(x.shape[0], -1, layer.dim)
    head_norms = layer.query_norm, layer.key_norm, layer.eps, layer.offset
    query = ops.kv.append(qkv, *head_norms, cos, sin, layer.rotation, slots, key_pages, value_pages)
    if last is not None:
        if not len(last.tokens):
            return x[:0], stream[:0]
        query, stream, rows = query.index_select(0, last.tokens), stream.index_select(0, last.tokens), last.rows
    options = layer.scale, layer.window, layer.soft_cap, layer.sinks
    seen = ops.attention.paged(query, key_pages, value_pages, rows, *options)
    x = layer.out(seen.flatten(1), ops)
    if layer.after_attention is not None:
        x = norm.rms(x, layer.after_attention, layer.eps, layer.offset)
    x, stream = norm.add_rms(x, stream, layer.before_mlp, layer.eps, layer.offset)
    x = layer.down(getattr(ops.activation, layer.gate)(layer.gate_up(x, ops)), ops)
    if layer.after_mlp is not None:
        x = norm.rms(x, layer.after_mlp, layer.eps, layer.offset)
    return x, stream


def prepare_stack(layers: Sequence[Any]) -> Any:
    """All layers of a model, each as `prepare` made it, as this device's `decoders` wants them; here: as they are."""
    return tuple(layers)


def decoders(
    ops: Ops,
    stack: Iterable[Any],
    x: Tensor,
    stream: Tensor,
    turns: Sequence[tuple[Tensor, Tensor]],
    turn_of: Sequence[int],
    rows: Rows,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Last | None = None,
) -> tuple[Tensor, Tensor]:
    """`decoder` for one layer after the other. turns are the (cos, sin) of every way in which layers rotate, turn_of
    [layers] says which of them each does; keys and values [layers, pages, page_size, kv heads, dim] are their pages.
    `last` is the last layer's."""
    left = len(turn_of)
    for layer, turn, *pages in zip(stack, turn_of, keys, values, strict=True):
        left -= 1
        own = None if left else last
        x, stream = ops.layer.decoder(ops, layer, x, stream, *turns[turn], rows, slots, *pages, own)
    return x, stream


@dataclass(frozen=True, slots=True)
class Layer:
    """Which implementation of whole layers a device uses; `decoder` is given what `prepare` made, `decoders` what
    `prepare_stack` made of those, once, at load."""

    decoder: Callable[..., tuple[Tensor, Tensor]] = decoder
    prepare: Callable[[DecoderLayer], Any] = prepare
    decoders: Callable[..., tuple[Tensor, Tensor]] = decoders
    prepare_stack: Callable[[Sequence[Any]], Any] = prepare_stack


def inputs(
    lens: list[tuple[int, int]],  # of each row: queries, context
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    hidden: int = 48,
    inner: int = 72,
    *,
    layers: int = 0,  # more than one layer, in a stack
    last: tuple[int, ...] | None = None,  # rows of whose last tokens the answers are
    bias: bool = False,
    head_norms: bool = True,
    after_norms: bool = False,
    offset: float = 0.0,
    gate: Gate = "silu_and_mul",
    page_size: int = 4,
    **options: Any,
) -> Callable[[torch.Generator, torch.dtype], Mapping[str, Any]]:
    """Makes the arguments of a random `decoder`, or of `decoders`, for cases and other tests."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        from . import Ops

        def random(*shape: int, size: float = 1.0, mean: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size + mean).to(dtype)

        def product(outs: int, ins: int) -> Product:
            shift = random(outs, size=0.1).float() if bias else None
            return Product("dense", random(outs, ins, size=ins**-0.5), shift)

        def norm(wanted: bool, width: int) -> Tensor | None:
            return random(width, size=0.1, mean=1.0 - offset) if wanted else None

        def layer() -> DecoderLayer:
            return DecoderLayer(
                random(hidden, size=0.1, mean=1.0 - offset),
                random(hidden, size=0.1, mean=1.0 - offset),
                norm(after_norms, hidden),
                norm(after_norms, hidden),
                norm(head_norms, dim),
                norm(head_norms, dim),
                product((heads + 2 * kv_heads) * dim, hidden),
                product(hidden, heads * dim),
                product(2 * inner, hidden),
                product(hidden, inner),
                gate,
                "neox",
                dim,
                1e-6,
                offset,
                dim**-0.5,
                **options,
            )

        own = tuple(layer() for _ in range(max(layers, 1)))
        queries, contexts = ([one[i] for one in lens] for i in (0, 1))
        each = -(-max(contexts) // page_size)
        table = torch.randperm(len(lens) * each, generator=generator).view(len(lens), each).int() + 1
        at = [
            int(table[row, place // page_size]) * page_size + place % page_size
            for row, (queried, context) in enumerate(lens)
            for place in range(context - queried, context)
        ]
        tokens = sum(queries)
        angle = torch.rand(tokens, dim // 2, generator=generator) * 100.0
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        pages = random(2, len(own), len(lens) * each + 1, page_size, kv_heads, dim)
        turn = angle.cos(), angle.sin()
        step: dict[str, Any] = {
            "ops": Ops(),
            "x": random(tokens, hidden),
            "stream": random(tokens, hidden),
            "rows": Rows(starts, torch.tensor(contexts).int(), table, tuple(queries), tuple(contexts)),
            "slots": torch.tensor(at),
        }
        if last is not None:
            which, ones = torch.tensor(last, dtype=torch.int32), (1,) * len(last)
            own_rows = torch.arange(len(last) + 1).int(), step["rows"].context_lens[which], table[which]
            answered = Rows(*own_rows, ones, tuple(contexts[row] for row in last))
            step["last"] = Last(starts[1:][which] - 1, answered)
        if layers:
            return {
                **step,
                "stack": own,
                "turns": [turn],
                "turn_of": [0] * layers,
                "keys": pages[0],
                "values": pages[1],
            }
        cache = {"key_pages": pages[0, 0], "value_pages": pages[1, 0]}
        return {**step, **cache, "layer": own[0], "cos": turn[0], "sin": turn[1]}

    return make


_MIXED = [(1, 9), (1, 1), (5, 5), (3, 12), (1, 6)]
_WIDE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "hidden": 256, "inner": 192, "page_size": 16}
_TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 4e-2}

CASES = [
    *(
        Case("layer.decoder", label, make, _TOLERANCES, mutates=("key_pages", "value_pages"), packs=("layer",))
        for label, make in [
            ("one-row", inputs([(1, 10)])),
            ("decode", inputs([(1, 9), (1, 1), (1, 16), (1, 7)])),
            ("prompt", inputs([(33, 33)])),
            ("mixed", inputs(_MIXED)),
            ("plain-heads", inputs(_MIXED, head_norms=False)),
            ("bias", inputs(_MIXED, bias=True)),
            ("gemma", inputs(_MIXED, after_norms=True, offset=1.0, gate="gelu_tanh_and_mul", window=4)),
            ("soft-cap", inputs(_MIXED, soft_cap=2.0, gate="gelu_and_mul")),
            ("sinks", inputs(_MIXED, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
            ("odd-shape", inputs(_MIXED, heads=3, kv_heads=1, dim=34, hidden=37, inner=45)),
            ("last-tokens", inputs(_MIXED, last=(0, 2, 3))),
            ("no-last-tokens", inputs([(7, 7)], last=())),
        ]
    ),
    *(
        Case("layer.decoders", label, make, _TOLERANCES, mutates=("keys", "values"), packs=("stack",))
        for label, make in [
            ("one-row", inputs([(1, 10)], layers=3)),
            ("decode", inputs([(1, 9), (1, 1), (1, 16), (1, 7)], layers=2)),
            ("mixed", inputs(_MIXED, layers=2)),
            ("last-tokens", inputs(_MIXED, layers=3, last=(1, 2))),
            ("wide", inputs([(1, 150)], layers=2, **_WIDE)),
            ("wide-rows", inputs([(1, 9), (1, 1), (1, 300)], layers=3, **_WIDE)),
            ("wide-plain-heads", inputs([(1, 33)], layers=2, head_norms=False, bias=True, **_WIDE)),
        ]
    ),
]
