"""The fields that requests of several routes have: the model with its adapter, and texts or token ids."""

from __future__ import annotations

from typing import Annotated, Any, cast

from msgspec import Meta

from ...engine.ranges import RANGES
from ..errors import InvalidRequest, UnsupportedParameter
from . import lifetime
from .admin import LoadFields, LoadFlags
from .body import WireBody

Name = Annotated[str, Meta(min_length=1, max_length=512)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
MAX_ADAPTERS = 16  # entries of `lora`; more than one are refused by name
Texts = str | list[str | TokenId | list[TokenId]]  # one text or several, as text or as token ids


class LoraEntry(WireBody):
    """An adapter of the model; `scale` multiplies its change of the weights."""

    name: Name
    scale: float = 1.0


class TargetBody(WireBody, kw_only=True):
    """The fields that select a model and its adapter, and labels."""

    model: Name | None = None  # a model, or model:adapter; optional while exactly one model is loaded
    lora: Annotated[list[LoraEntry], Meta(max_length=MAX_ADAPTERS)] | None = (
        None  # at most one adapter; an empty list selects the base model
    )
    load: LoadFields | None = None  # load the model with these options (unix socket or API key only)
    keep_alive: float | str | None = None  # time that the model stays loaded after this request: seconds, or "5m"
    ttl: float | None = None  # the same in seconds, as in LM Studio
    user: str | None = None  # without effect: see ignored.py

    @property
    def load_flags(self) -> LoadFlags | None:
        """The options with which the model must be loaded; None: the request uses the model as it is loaded."""
        return None if self.load is None else self.load.flags

    @property
    def lifetime(self) -> float | None:
        """Seconds that the model stays loaded after this request; infinite: always; None: the setting idle_unload.
        Raises InvalidRequest."""
        if self.keep_alive is not None:
            return lifetime.seconds(self.keep_alive, "keep_alive")
        return None if self.ttl is None else lifetime.seconds(self.ttl, "ttl")

    def check_lora(self) -> None:
        """Raises InvalidRequest for several adapters, or a scale out of range."""
        entries = self.lora or []
        if len(entries) > 1:
            names = ", ".join(entry.name for entry in entries)
            raise UnsupportedParameter(f"lora: a request may select one adapter, not {names}", param="lora")
        for entry in entries:
            if entry.scale not in RANGES["adapter_scale"]:
                raise InvalidRequest(
                    f"lora[0].scale: adapter_scale must be {RANGES['adapter_scale']}, not {entry.scale}",
                    param="lora[0].scale",
                )

    def adapter_arguments(self) -> dict[str, Any]:
        """The adapter fields of a frame; empty if the model id or the default scales select the adapter."""
        if self.lora is None:
            return {}
        if not self.lora:
            return {"adapter": ""}
        return {"adapter": self.lora[0].name, "adapter_scale": self.lora[0].scale}


def texts_of(value: Texts, param: str, limit: int) -> list[str | list[int]]:
    """The texts, or lists of token ids, in the parameter `param`.

    Raises InvalidRequest for a mixed or empty list, an empty text, or more than `limit` texts.
    """
    if isinstance(value, str):
        texts: list[str | list[int]] = [value]
    else:
        texts = _texts_of_list(value, param)
    if len(texts) > limit:
        raise InvalidRequest(f"{len(texts)} {param}s exceed the limit of {limit}", param=param)
    if not all(texts):
        raise InvalidRequest(f"{param}: a text must have at least one token", param=param)
    return texts


def _texts_of_list(values: list[str | TokenId | list[TokenId]], param: str) -> list[str | list[int]]:
    if not values:
        raise InvalidRequest(f"{param}: the list is empty", param=param)
    kinds = {type(item) for item in values}
    if len(kinds) != 1:
        raise InvalidRequest(
            f"{param} must be a string, a list of strings, a list of token ids, or a list of such lists (not mixed)",
            param=param,
        )
    if kinds == {int}:
        return [cast("list[int]", values)]
    return cast("list[str | list[int]]", values)
