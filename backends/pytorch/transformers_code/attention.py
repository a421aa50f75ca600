"""The attention of transformers' code: an entry of its attention interface that calls our paged attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ....kernels.ops import Ops
from ....kernels.ops.attention import Attend
from ....kernels.ops.kv import Append, store_int8
from ....kernels.ops.step import Adapters
from ..inputs import Step
from ..kv import GroupedKV

NAME = "localllm_paged"  # of the attention in transformers' interface. Without masks: our attention needs none
PROBE = "localllm_probe"  # the same attention with masks, which the probe reads
PLACE = "localllm_place"  # attribute of a module that calls the attention
# Arguments without effect on the result, for one step without dropout.
_NEUTRAL = frozenset(
    "dropout position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits "
    "return_dict num_items_in_batch cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k layer_idx logits_to_keep "
    "input_ids past_key_values training".split()
)
_SINKS = ("s_aux", "sinks")
_READ = frozenset(("scaling", "sliding_window", "softcap", "is_causal", *_SINKS))


class Unsupported(Exception):
    """A call of the attention that our paged attention does not compute. The text has the reason."""


class Mask(NamedTuple):
    """The mask that transformers' code asks for: each query sees the last `window` positions; 0: all positions."""

    window: int
    is_supported: bool  # False: it is neither causal nor a window


def mask(q_length: int, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Mask:
    """The mask interface of transformers, for the probe."""
    window = local_size or 0
    last = 2 * (window or q_length) + 2
    first = last - window + 1 if window else 0

    def sees(query: int, key: int) -> bool:
        with torch.device("cpu"):
            return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    sees_window = sees(last, last) and sees(last, first) and not (window and sees(last, first - 1))
    return Mask(window, sees_window and not sees(0, 1) and not sees(first, last))


class Current:
    """The step that a model computes. Its modules read it."""

    step: Step
    ops: Ops
    kv: GroupedKV
    adapters: Adapters | None  # of the tokens that the modules compute
    hidden: Tensor  # [1, samples, hidden]: of the output head

    def begin(self, step: Step, ops: Ops, kv: GroupedKV) -> None:
        """Begin the layers of a step."""
        self.step, self.ops, self.kv, self.adapters = step, ops, kv, step.adapters

    def begin_head(self, hidden: Tensor, ops: Ops, adapters: Adapters | None) -> None:
        """Begin the output head of a step."""
        self.hidden, self.ops, self.adapters = hidden, ops, adapters


class Call(NamedTuple):
    """The arguments of attention that belong to a module. They are the same in every step."""

    scale: float
    window: int
    soft_cap: float


def arguments(query: Tensor, attention_mask: Any, options: dict[str, Any]) -> Call:
    """The arguments of a call in the probe. Raises Unsupported for an argument that our attention does not have."""
    unknown = sorted(key for key, value in options.items() if value is not None and key not in _READ | _NEUTRAL)
    if unknown:
        raise Unsupported(f"its attention has the argument {unknown[0]}")
    if options.get("is_causal") is False:
        raise Unsupported("its attention is not causal")
    if not isinstance(attention_mask, Mask):
        raise Unsupported("its attention has a mask of its own")
    if not attention_mask.is_supported:
        raise Unsupported("its attention mask is neither causal nor a sliding window")
    scale = options.get("scaling")
    if isinstance(scale, Tensor):
        raise Unsupported("its attention scale is a tensor")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return Call(scale, attention_mask.window, float(options.get("softcap") or 0.0))


class Place:
    """The pages of one attention module, and its arguments."""

    def __init__(self, current: Current, index: int, call: Call) -> None:
        self._current = current
        self._index = index
        self._call = call

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, options: dict[str, Any]
    ) -> Tensor:
        """query [1, heads, tokens, dim], key and value [1, kv heads, tokens, dim] -> [1, tokens, heads, value dim].
        Keys and values go to the cache."""
        ops, cache = self._current.ops, self._current.kv.cache
        places = self._current.step.places[cache.groups[self._index] if cache.groups else 0]
        keys, values = cache.layers[self._index]
        scales = cache.layer_scales(self._index)
        width = value.shape[-1]
        query, key, value = (_rows(part, keys.shape[-1]) for part in (query, key, value))
        if scales is None:
            ops.kv.store(key, value, keys, values, places.slots)
        else:
            store_int8(key, value, Append(keys, values, "neox", scales=scales), places.slots)
        sinks = next((options[name] for name in _SINKS if options.get(name) is not None), None)
        sinks = None if sinks is None else sinks.float().flatten()
        attend = Attend(keys, values, *self._call, sinks, scales)
        return ops.attention.paged(query, places.rows, attend)[..., :width].unsqueeze(0)


def _rows(part: Tensor, dim: int) -> Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim], contiguous, with zeros up to the dimension of the cache."""
    rows = part[0].transpose(0, 1)
    if rows.shape[-1] < dim:
        return F.pad(rows, (0, dim - rows.shape[-1]))
    return rows.contiguous()


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention interface of transformers. A module without a place fails."""
    place = getattr(module, PLACE)
    return place(query, key, value, attention_mask, options), None


AttentionInterface.register(NAME, attend)
AttentionInterface.register(PROBE, attend)
AttentionMaskInterface.register(PROBE, mask)
