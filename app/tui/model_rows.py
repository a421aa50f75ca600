"""The rows of the model screen: models on this machine with their adapters, downloads, and models of the catalog."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..client import AdapterFolder, Catalog, Job, LoadedModel, Machine, ModelEntry, Offer, agree, fit_of, speed_of
from ..sizes import size
from .text import one_line

OVERHEAD = 1.15  # memory of a model divided by the size of its weights, with a short context
ENDED = ("done", "failed", "cancelled")
_FITS = {
    "fits": "fits this machine",
    "tight": "fits if other programs free memory",
    "too large": "too large for this machine",
    "unknown": "",
}


@dataclass(frozen=True)
class Row:
    """A row: a model on this machine (`entry`), a model of the catalog (`offer`), or a name that the user has typed.

    `job` is the latest download of the row. `key` identifies the row, and is the name for a download.
    """

    key: str
    entry: ModelEntry | None = None
    offer: Offer | None = None
    job: Job | None = None
    adapters: tuple[str, ...] = ()

    @property
    def is_usable(self) -> bool:
        """True for a complete model on this machine."""
        return self.entry is not None and not self.entry.problem

    @property
    def downloads(self) -> bool:
        return self.job is not None and self.job.state not in ENDED


def rows(
    entries: Sequence[ModelEntry], catalog: Catalog, jobs: Sequence[Job], folders: Sequence[AdapterFolder]
) -> list[Row]:
    """The models on this machine, then other downloads, then the models of the catalog, suggestions first."""
    by_name = {job.name: job for job in jobs}
    local = [
        Row(entry.id, entry=entry, job=by_name.pop(entry.id, None), adapters=_adapters(entry, folders))
        for entry in entries
    ]
    offered = []
    for offer in catalog.offers:
        if not offer.installed:
            offered.append(Row(offer.name, offer=offer, job=by_name.pop(offer.name, None)))
    others = [Row(name, job=job) for name, job in by_name.items() if job.state != "done"]
    offered.sort(key=_order)
    return [*local, *others, *offered]


def _order(row: Row) -> tuple[bool, bool, bool]:
    """Running downloads, then suggestions, then models that fit, then the others."""
    offer = row.offer
    suggested = offer is not None and offer.suggested
    fits = offer is not None and offer.fit != "too large"
    return (row.job is None, not suggested, not fits)


def _adapters(entry: ModelEntry, folders: Sequence[AdapterFolder]) -> tuple[str, ...]:
    return tuple(folder.id for folder in folders if folder.base and agree(folder.base, entry.id))


def facts(row: Row, machine: Machine, running: LoadedModel | None) -> str:
    """The second line of a row: the progress of its download, or the facts by which a user judges the model."""
    if row.job is not None and row.job.state != "done":
        return progress(row.job)
    if row.entry is not None:
        return _joined(_local_facts(row.entry, machine, running))
    if row.offer is not None:
        return _joined(_offer_facts(row.offer))
    return "Enter downloads it"


def progress(job: Job) -> str:
    """The state of a download, with bytes, speed and remaining time."""
    share = f"{job.received / job.total:.0%} of {size(job.total)}" if job.total else ""
    speed = f"{size(job.speed)}/s" if job.speed else ""
    eta = f"{duration(job.eta)} left" if job.eta is not None else ""
    state = {
        "planning": "asking the hub",
        "waiting": "waiting for another download",
        "failed": one_line(f"failed: {job.error}. {job.hint}", 200),
        "cancelled": "cancelled; a download continues it",
    }.get(job.state, job.state)
    return _joined([state, share, speed, eta])


def bar(job: Job, width: int = 24) -> str:
    """A progress bar as text; empty if the total is not known yet."""
    if not job.total or job.state in ENDED:
        return ""
    filled = int(width * min(1.0, job.received / job.total))
    return "█" * filled + "░" * (width - filled)


def duration(seconds: float) -> str:
    """A duration as text, in the largest suitable unit."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _local_facts(entry: ModelEntry, machine: Machine, running: LoadedModel | None) -> list[str]:
    if entry.problem:
        return [one_line(f"cannot be used: {entry.problem}", 200)]
    loaded = f"loaded, {running.backend}" if running else "loaded" if entry.loaded else ""
    texts = [loaded, "built-in, tiny" if entry.bundled else ""]
    texts.append(size(entry.size) if entry.size else "")
    texts.append(f"{entry.context:,} tokens" if entry.context else "")
    if not entry.bundled:
        texts.append("" if loaded else _FITS[fit_of(int(entry.size * OVERHEAD), machine)])
        texts.append(_speed(speed_of(entry.size, machine)))
    return texts


def _offer_facts(offer: Offer) -> list[str]:
    fit = _FITS[offer.fit]
    return [
        "suggested" if offer.suggested else "not downloaded",
        size(offer.size) if offer.size else "",
        fit,
        _speed(offer.speed) if offer.fit in ("fits", "tight") else "",
        offer.licence,
        "needs an account" if offer.gated else "",
        offer.description,
    ]


def _speed(speed: float) -> str:
    """An estimated speed as text; empty if it is unknown."""
    if not speed:
        return ""
    return f"estimated {speed:.0f} tok/s" if speed >= 1 else "estimated under 1 tok/s"


def _joined(texts: Iterable[str]) -> str:
    return " · ".join(text for text in texts if text)
