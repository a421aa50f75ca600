"""The second line of a row of the model screen: the progress of a download, or the facts about a model."""

from __future__ import annotations

from collections.abc import Iterable

from ...client import Job, LoadedModel, Machine, ModelEntry, Offer, fit_of, speed_of
from ...sizes import size
from ..text import one_line
from .rows import ENDED, Row

OVERHEAD = 1.15  # memory of a model divided by the size of its weights, with a short context
MAX_LENGTH = 300  # characters of an error
FITS = {
    "fits": "fits this machine",
    "tight": "fits if other programs free memory",
    "too large": "too large for this machine",
    "unknown": "",
}
TYPED = {
    "name": "Enter inspects it on the hub · d downloads it",
    "folder": "Enter adds the model in this folder",
}


def facts(row: Row, machine: Machine, running: LoadedModel | None) -> str:
    """The facts about a row on one line. `running`: the loaded model of the row."""
    if row.job is not None and row.job.state != "done":
        return progress(row.job)
    if row.entry is not None:
        return joined(_local_facts(row.entry, machine, running))
    if row.offer is not None:
        return joined(_offer_facts(row.offer))
    return TYPED.get(row.kind, "")


def progress(job: Job) -> str:
    """The state of a download, with bytes, speed and remaining time."""
    share = f"{job.received / job.total:.0%} of {size(job.total)}" if job.total else ""
    speed = f"{size(job.speed)}/s" if job.speed else ""
    eta = f"{duration(job.eta)} left" if job.eta is not None else ""
    state = {
        "planning": "asking the hub",
        "waiting": "waiting for another download",
        "failed": one_line(f"failed: {job.error}", MAX_LENGTH),
        "cancelled": "cancelled; a download continues it",
    }.get(job.state, job.state)
    return joined([state, share, speed, eta])


def advice(row: Row) -> str:
    """The line after the facts of a row with a failed download: the hint of the error, and the key that retries."""
    if row.job is None or row.job.state != "failed":
        return ""
    return one_line(joined([row.job.hint, "Enter tries again"]), MAX_LENGTH)


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


def speed_text(speed: float) -> str:
    """An estimated speed in tokens per second as text; empty if it is unknown."""
    if not speed:
        return ""
    return f"estimated {speed:.0f} tok/s" if speed >= 1 else "estimated under 1 tok/s"


def joined(texts: Iterable[str]) -> str:
    """The texts that are not empty, on one line."""
    return " · ".join(text for text in texts if text)


def _local_facts(entry: ModelEntry, machine: Machine, running: LoadedModel | None) -> list[str]:
    if entry.problem:
        return [one_line(f"cannot be used: {entry.problem}", MAX_LENGTH)]
    loaded = f"loaded, {running.backend}" if running else "loaded" if entry.loaded else ""
    texts = [loaded, "built-in, tiny" if entry.bundled else ""]
    texts.append(size(entry.size) if entry.size else "")
    texts.append(f"{entry.context:,} tokens" if entry.context else "")
    if not entry.bundled:
        texts.append("" if loaded else FITS[fit_of(int(entry.size * OVERHEAD), machine)])
        texts.append(speed_text(speed_of(entry.size, machine)))
    return texts


def _offer_facts(offer: Offer) -> list[str]:
    return [
        size(offer.size) if offer.size else "",
        FITS[offer.fit],
        speed_text(offer.speed) if offer.fit in ("fits", "tight") else "",
        offer.licence,
        "needs an account" if offer.gated else "",
        offer.description,
    ]
