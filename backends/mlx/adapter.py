"""Adapts objects of mlx-lm: caches, and the classes of a model's modules. No other file changes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_causal_mask
from mlx_lm.models.base import create_attention_mask as attention_mask_of_model
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, create_attention_mask, make_prompt_cache

from ...engine.errors import ModelRefused
from ...engine.files.model_config import ModelConfig
from ...engine.files.peft_modules import HEAD
from ...engine.files.peft_names import text_module


class _Window:
    """Mixin for mlx-lm's caches that store every position, until `drop`: a layer with a window reads only the last
    columns."""

    keys: mx.array  # [rows, kv heads, columns, dim]
    values: mx.array
    window = 0  # positions that a token sees, including its position; 0: all
    padded = False  # whether rows have padding columns before their first position

    def drop(self, columns: int) -> None:
        """Drop the first columns, which the window has passed, and free their memory."""
        self.keys, self.values = (mx.contiguous(x[..., columns:, :]) for x in (self.keys, self.values))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """New keys and values [rows, kv heads, new, dim] -> the keys and values that the new tokens see."""
        visible: tuple[mx.array, ...] = super().update_and_fetch(keys, values)  # type: ignore[misc]
        columns = self.window + keys.shape[2] - 1
        if not self.window or visible[0].shape[2] <= columns:
            return visible
        return tuple(x[..., -columns:, :] for x in visible)

    def make_mask(self: Any, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of the next N tokens over the columns that update_and_fetch returns. mlx-lm passes these argument
        names."""
        end: int = self.size()
        before = min(end, self.window - 1) if self.window else end
        window = min(self.window or end + N, window_size or end + N)
        limit = window if window < before + N else None
        if not self.padded:
            return create_attention_mask(N, before, return_array, limit)
        left = self.left_padding if before == end else self.left_padding - (end - before)
        return create_causal_mask(N, before, limit, left_padding=left)


class RowCache(_Window, KVCache):  # type: ignore[misc]
    """The cache of one layer and one sequence."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.first = 0  # the position of the first column

    def size(self) -> int:
        columns: int = self.offset - self.first
        return columns

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        self.offset -= self.first  # mlx-lm's code takes the offset as the number of columns
        visible = super().update_and_fetch(keys, values)
        self.offset += self.first
        return visible

    def drop(self, columns: int) -> None:
        super().drop(columns)
        self.first += columns

    def row(self, index: int, length: int) -> RowCache:
        return self


class BatchCache(_Window, BatchKVCache):  # type: ignore[misc]
    """The cache of one layer and several sequences, which end in the same column."""

    @classmethod
    def of(cls, rows: list[RowCache]) -> BatchCache:
        """A cache with copies of these sequences. Either all of them are empty, or none."""
        columns = max(row.size() for row in rows)
        padding = [columns - row.size() for row in rows]
        cache = cls(padding)
        cache.window = rows[0].window
        cache.set_padding(padding)
        if columns:
            cache.keys = mx.concatenate([_padded(row.keys, row.size(), columns) for row in rows])
            cache.values = mx.concatenate([_padded(row.values, row.size(), columns) for row in rows])
            cache._idx = columns
        return cache

    def set_padding(self, padding: list[int]) -> None:
        """Set the number of padding columns before the first position of each row."""
        self.padding = padding
        self.padded = any(padding)
        self.left_padding = mx.array(padding)

    def drop(self, columns: int) -> None:
        super().drop(columns)
        self._idx -= columns
        self.set_padding([max(0, padding - columns) for padding in self.padding])

    def row(self, index: int, length: int) -> RowCache:
        """A copy of the cache of one sequence, which has `length` positions."""
        cache = RowCache(self.window)
        start, end = self.padding[index], self._idx
        cache.keys, cache.values = (mx.contiguous(x[index : index + 1, :, start:end]) for x in (self.keys, self.values))
        cache.offset = length
        cache.first = length - (end - start)
        return cache


def _padded(array: mx.array, size: int, columns: int) -> mx.array:
    """The first `size` columns [1, kv heads, columns, dim], after padding columns."""
    return mx.pad(array[..., :size, :], [(0, 0), (0, 0), (columns - size, 0), (0, 0)])


def mix(part: nn.Module, kind: type, **values: Any) -> None:
    """Replace methods of a module by the methods of `kind`. `values` become attributes of the module's class."""
    base = type(part)
    attributes = {name: staticmethod(value) if callable(value) else value for name, value in values.items()}
    part.__class__ = type(base.__name__, (kind, base), attributes)


class Gated:
    """Mixin for an MLP of mlx-lm: applies the activation that ModelConfig names to the gate."""

    activation: Callable[[mx.array, mx.array], mx.array]

    def __call__(self: Any, x: mx.array) -> mx.array:
        """[rows, tokens, hidden] -> the same shape."""
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate = self.gate_proj(x)
            up = self.up_proj(x)
        output: mx.array = self.down_proj(self.activation(gate, up))
        return output


class Ungated:
    """Mixin for an MLP of mlx-lm with two projections: applies the activation that config.json names."""

    activation: Callable[[mx.array], mx.array]

    def __call__(self: Any, x: mx.array) -> mx.array:
        """[rows, tokens, hidden] -> the same shape."""
        first, last = next(names for names in UNGATED if names[0] in self)
        output: mx.array = self[last](self.activation(self[first](x)))
        return output


UNGATED = (("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"))  # names of the projections


class Layers:
    """Mixin for mlx-lm's stack of layers: makes one mask for each kind of layer. mlx-lm's own code supports one kind,
    or a fixed pattern of kinds."""

    embedding_scale: float
    first_of_kind: list[int]  # for each layer, the index of the first layer of its kind

    def __call__(self: Any, inputs: mx.array, cache: Sequence[Any], *_: Any) -> mx.array:
        """Tokens [rows, new] -> normalised hidden states [rows, new, hidden]."""
        h = self.embed_tokens(inputs)
        if self.embedding_scale != 1.0:
            h = h * mx.array(self.embedding_scale, h.dtype)
        masks = {layer: attention_mask_of_model(h, cache[layer]) for layer in set(self.first_of_kind)}
        for layer, layer_cache, first in zip(self.layers, cache, self.first_of_kind, strict=True):
            h = layer(h, masks[first], layer_cache)
        output: mx.array = self.norm(h)
        return output


class Head:
    """Mixin for an mlx-lm model with an output head: applies the soft cap, the caches and the tied weights that
    ModelConfig describes."""

    config: ModelConfig

    def __call__(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = super().__call__(*args, **kwargs)  # type: ignore[misc]
        cap = self.config.logit_soft_cap
        return mx.tanh(logits / cap) * cap if cap else logits

    def make_cache(self: Any) -> list[KVCache | RotatingKVCache]:
        window = self.config.window
        return [RotatingKVCache(window) if kind == "sliding" else KVCache() for kind in self.config.layer_kinds]

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The weights to load. A tied head uses the embedding, even if the files have a head. An untied head must be in
        the files."""
        if self.config.tie_embeddings:
            weights = {name: weight for name, weight in weights.items() if not name.startswith("lm_head.")}
        elif "lm_head.weight" not in weights:
            raise ModelRefused("its files have no lm_head.weight, but tie_word_embeddings is false in config.json")
        sanitize = getattr(super(), "sanitize", None)
        return weights if sanitize is None else sanitize(weights)


class Windows:
    """Mixin for an mlx-lm model whose layers have no windows: each layer gets one."""

    window: int

    def make_cache(self: Any) -> list[RotatingKVCache]:
        return [RotatingKVCache(self.window) for _ in self.layers]


class _Tap:
    """Stores the hidden states of the last call of the model."""

    hidden: mx.array | None = None


class _LastToken:
    """Mixin for mlx-lm's stack of layers: passes only the last token of each row to the head, and stores its hidden
    state."""

    tap: _Tap

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        self.tap.hidden = super().__call__(*args, **kwargs)[:, -1:]  # type: ignore[misc]
        return self.tap.hidden


class Forward:
    """Computes the logits of each row's last token."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tap = _Tap()
        layers = getattr(model, "model", None)
        if isinstance(layers, nn.Module):
            mix(layers, _LastToken, tap=self._tap)

    def __call__(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """tokens [rows, new] -> logits [rows, vocab] and normalised hidden states [rows, hidden] of the last token. The
        hidden states are [rows, 0] if the model has no `model` attribute."""
        logits = self._model(tokens, cache=caches)[:, -1]
        hidden = self._tap.hidden
        self._tap.hidden = None  # a stored array would keep all arrays of a failed step in memory
        return logits, logits[:, :0] if hidden is None else hidden[:, -1]


def probe_layers(model: nn.Module, forward: Forward) -> list[RowCache]:
    """The cache of each layer after one token. Its arrays are lazy: they have shapes, but are never computed.

    Raises ModelRefused for a model whose layers store anything except keys and values. Also for a model that does not
    use MLX's attention function, because its masks may be wrong for several rows.
    """
    caches = [_row_cache(cache) for cache in make_prompt_cache(model)]
    with observed(mx.fast, "scaled_dot_product_attention") as calls:
        forward(mx.zeros((1, 1), mx.int32), caches)
    if any(cache.empty() for cache in caches):
        raise ModelRefused("a layer stores no keys and values, which is not supported here yet")
    if len(calls) < len(caches):
        raise ModelRefused(
            "mlx-lm computes its attention without MLX's attention function, and may not support several rows",
            "choose a model of another architecture",
        )
    return caches


def _row_cache(cache: Any) -> RowCache:
    """An empty RowCache that replaces mlx-lm's `cache`."""
    if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", False):
        raise ModelRefused(
            f"its layers store a {type(cache).__name__}, not plain keys and values: recurrent and compressed caches "
            "are not supported here yet",
            "choose a model of another architecture",
        )
    return RowCache(getattr(cache, "max_size", 0))


@contextmanager
def observed(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """A context that records the positional arguments of each call of the function or method."""
    function = getattr(owner, name)
    calls: list[tuple[Any, ...]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield calls
    finally:
        setattr(owner, name, function)


@contextmanager
def observed_fields() -> Iterator[set[str]]:
    """A context that records the names of the fields that the classes of mlx-lm read from their arguments. A class may
    declare a field of config.json and ignore it."""
    fields: set[str] = set()

    def read(arguments: BaseModelArgs, name: str) -> Any:
        if sys._getframe(1).f_code.co_name != "__post_init__":  # which only checks and completes the fields
            fields.add(name)
        return object.__getattribute__(arguments, name)

    BaseModelArgs.__getattribute__ = read  # type: ignore[assignment, method-assign]
    try:
        yield fields
    finally:
        del BaseModelArgs.__getattribute__


class Target(NamedTuple):
    """A module that can have LoRA factors."""

    module: nn.Module
    method: str  # the method whose output an adapter changes
    in_features: int
    out_features: int
    reads_tokens: bool  # the input is tokens [rows, new], not features [rows, new, in_features]


# MLX's module classes that can have LoRA factors: (class, method, number of dimensions of its input).
_METHODS = (
    (nn.Linear, "__call__", 3),
    (nn.QuantizedLinear, "__call__", 3),
    (nn.Embedding, "__call__", 2),
    (nn.QuantizedEmbedding, "__call__", 2),
    (nn.Embedding, "as_linear", 3),
    (nn.QuantizedEmbedding, "as_linear", 3),
)


def find_targets(model: nn.Module, forward: Forward) -> dict[str, Target]:
    """The modules that can have LoRA factors, by their names in a causal language model. A tied head is named HEAD.

    To find them, the model computes one token with lazy arrays. A module is a target only if the model calls it, with
    an input that begins with the dimensions [rows, tokens].
    """
    names = {id(module): text_module(name) for name, module in model.named_modules()}
    caches = [_row_cache(cache) for cache in make_prompt_cache(model)]
    targets: dict[str, Target] = {}
    with ExitStack() as contexts:
        calls = [contexts.enter_context(observed(kind, method)) for kind, method, _ in _METHODS]
        forward(mx.zeros((1, 1), mx.int32), caches)
    for (_, method, dimensions), arguments in zip(_METHODS, calls, strict=True):
        for module, x in arguments:
            name = HEAD if method == "as_linear" else names.get(id(module))
            if name is not None and x.ndim == dimensions and x.shape[:2] == (1, 1):
                targets[name] = _target(module, method, reads_tokens=dimensions == 2)
    return targets


def tied_embedding(targets: Mapping[str, Target]) -> str:
    """The name of the embedding that is also the output head; empty if the head is not tied."""
    head = targets.get(HEAD)
    names = [name for name, target in targets.items() if head is not None and target.module is head.module]
    return next((name for name in names if name != HEAD), "")


def _target(module: nn.Module, method: str, *, reads_tokens: bool) -> Target:
    rows, columns = module.weight.shape
    if "scales" in module:
        columns = columns * 32 // module.bits  # quantised: each column is a word of 32 bits
    features = (rows, columns) if reads_tokens else (columns, rows)
    return Target(module, method, *features, reads_tokens)


def add_to_output(target: Target, add: Callable[[mx.array, mx.array], mx.array]) -> None:
    """Change the module: the output of the target's method becomes add(output, input)."""
    module = target.module
    base = type(module)
    original = getattr(base, target.method)
    name = f"add_to_{target.method}"

    def call(self: nn.Module, x: mx.array) -> mx.array:
        output: mx.array = getattr(self, name)(original(self, x), x)
        return output

    setattr(module, name, add)  # in the module: Python frees classes late, and `add` keeps the factors
    module.__class__ = type(base.__name__, (base,), {target.method: call})
