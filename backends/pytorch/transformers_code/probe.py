"""Runs a model's code once without values, on the device meta, and records the calls of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .attention import PLACE, PROBE, Call, Unsupported, arguments
from .classes import refused, skeleton

TOKENS = 5
OWN_ATTENTION = "its attention does not use the attention interface of transformers"


@dataclass(frozen=True)
class Attending:
    """One attention module: its name, and the shapes of its keys and values."""

    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    call: Call


@dataclass
class Calls:
    """The calls of a step of TOKENS tokens."""

    attention: list[Attending] = field(default_factory=list)
    linear: Counter[str] = field(default_factory=Counter)  # name of a linear layer -> calls with one row per token
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)  # the input of each of these calls, in order
    irregular: set[str] = field(default_factory=set)  # linear layers with other calls

    def siblings(self) -> list[list[str]]:
        """Linear layers that are called once each, one after the other, with the same input."""
        groups = [[name for name, _ in run] for _, run in groupby(self.inputs, key=lambda call: id(call[1]))]
        return [names for names in groups if all(self.linear[name] == 1 for name in names)]


def probe(config: Any) -> tuple[Any, Calls]:
    """(the model on the device meta, the calls of its parts). Raises ModelRefused if its code cannot run so."""
    model_type = config.model_type
    try:
        model = skeleton(config, PROBE, "meta")
        calls = Calls()
        _watch(model, calls)
        with torch.inference_mode():
            ids = torch.zeros(1, TOKENS, dtype=torch.int32, device="meta")
            # Without a mask, transformers would read the positions on the host.
            whole = torch.ones(1, TOKENS, dtype=torch.bool, device="meta")
            model(input_ids=ids, attention_mask=whole, position_ids=ids, use_cache=False)
    except Unsupported as error:
        raise refused(model_type, str(error)) from error
    except Exception as error:  # any code of transformers may run here
        if PROBE in str(error) or "'Mask'" in str(error):
            raise refused(model_type, OWN_ATTENTION) from error
        if "meta" in str(error):
            raise refused(model_type, "its code reads values on the host, so its calls cannot be probed") from error
        raise refused(model_type, f"its code cannot be probed ({type(error).__name__}: {error!s:.200})") from error
    if not calls.attention:
        raise refused(model_type, OWN_ATTENTION)
    names = Counter(each.name for each in calls.attention)
    if max(names.values()) > 1:
        raise refused(model_type, f"{next(name for name, n in names.items() if n > 1)} attends more than once")
    return model, calls


def _watch(model: Any, calls: Calls) -> None:
    for name, module in model.named_modules():
        object.__setattr__(module, PLACE, _recorder(name, calls))
        if type(module) is nn.Linear:
            module.register_forward_pre_hook(_counter(name, calls))


def _counter(name: str, calls: Calls) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def count(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        if x.numel() == TOKENS * x.shape[-1]:
            calls.linear[name] += 1
            calls.inputs.append((name, x))
        else:
            calls.irregular.add(name)

    return count


def _recorder(name: str, calls: Calls) -> Callable[..., Tensor]:
    def record(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, options: dict[str, Any]) -> Tensor:
        call = arguments(query, attention_mask, options)
        if query.shape[0] != 1 or query.shape[2] != TOKENS or key.shape[2] != TOKENS:
            raise Unsupported("its attention changes the number of tokens")
        shape = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        calls.attention.append(Attending(name, *shape, call))
        return query.new_empty(1, TOKENS, query.shape[1], value.shape[3])

    return record
