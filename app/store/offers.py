"""Models of the catalog, each with the answers: does it fit this machine, and how fast does it probably run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from ..frames import Machine
from .catalog import GB, Entry

Fit = Literal["unknown", "fits", "tight", "too large"]
MINIMUM_SPEED = 5.0  # tokens per second; slower models are not suggested
SUGGESTIONS = 3


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be downloaded. The sizes are approximate, the speed is estimated."""

    name: str  # short name
    repository: str
    licence: str = ""
    size: int = 0  # bytes to download; 0: unknown
    memory: int = 0  # bytes that the model needs; 0: unknown
    description: str = ""
    gated: bool = False
    installed: str = ""  # id of the model on this machine; empty: not downloaded
    fit: Fit = "unknown"  # tight: it fits the device, but not the memory that is free now
    speed: float = 0.0  # estimated tokens per second of one answer; 0: unknown
    suggested: bool = False


def offers(entries: Mapping[str, Entry], machine: Machine, installed: Iterable[str]) -> list[Offer]:
    """The models of the catalog, and three suggestions among them.

    `installed`: the ids of the models on this machine.
    """
    ids = {name.lower(): name for name in installed}
    listed = [_offer(name, entry, machine, ids) for name, entry in entries.items()]
    # Some installations have no backend for GGUF files, so none of them is suggested.
    suggested = suggestions([offer for offer in listed if "safetensors" in entries[offer.name].formats])
    return [msgspec.structs.replace(offer, suggested=offer.name in suggested) for offer in listed]


def fit_of(need: int, machine: Machine) -> Fit:
    """Whether a model that needs `need` bytes fits the device."""
    if not need or not machine.memory:
        return "unknown"
    if need <= machine.free:
        return "fits"
    return "tight" if need <= machine.memory else "too large"


def speed_of(size: int, machine: Machine) -> float:
    """Estimated tokens per second: decoding one token reads all weights once."""
    return machine.bandwidth / size if size else 0.0


def suggestions(listed: list[Offer]) -> set[str]:
    """The names of a small, a medium and the largest model that fit, are fast enough and need no account.

    If too few models are fast enough, or if no speed is known, the smallest models that fit are suggested too.
    """
    suitable = [offer for offer in listed if offer.fit == "fits" and not offer.gated and not offer.installed]
    suitable.sort(key=lambda offer: offer.size)
    fast = [offer for offer in suitable if offer.speed >= MINIMUM_SPEED]
    if len(fast) > SUGGESTIONS:
        return {fast[0].name, fast[len(fast) // 2].name, fast[-1].name}
    slow = [offer for offer in suitable if offer not in fast]
    return {offer.name for offer in [*fast, *slow][:SUGGESTIONS]}


def _offer(name: str, entry: Entry, machine: Machine, ids: Mapping[str, str]) -> Offer:
    size = int(entry.size * GB)
    need = int(entry.memory * GB)
    return Offer(
        name=name,
        repository=str(entry.target),
        licence=entry.licence,
        size=size,
        memory=need,
        description=entry.description,
        gated=entry.gated,
        installed=ids.get(str(entry.target).lower(), ""),
        fit=fit_of(need, machine),
        speed=speed_of(size, machine),
    )
