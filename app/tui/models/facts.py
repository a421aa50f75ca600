"""The second line of a row of the model screen: the progress of a download, or the facts about a model."""

from __future__ import annotations

from collections.abc import Iterable

from ...client import AdapterFolder, HubMatch, Job, LoadedModel, Machine, ModelEntry, Offer, fit_of, speed_of
from ...sizes import size
from ..text import one_line
from .rows import ENDED, Row

OVERHEAD = 1.15  # memory of a model divided by the size of its weights, with a short context
MAX_SPEED = 1000  # tokens per second; an estimate above it says nothing: other work than reads takes longer
MAX_LENGTH = 300  # characters of an error
FITS = {
    "fits": "fits this machine",
    "tight": "fits if other programs free memory",
    "too large": "too large for this machine",
    "unknown": "",
}
TYPED = {
    "name": "Enter inspects it on the hub · d downloads it",
    "folder": "Enter adds the model in this folder to localllm",
    "search": "Enter asks the hub for models with these words",
}


def facts(row: Row, machine: Machine, running: LoadedModel | None) -> str:
    """The facts about a row on one line. `running`: the loaded model of the row."""
    if row.job is not None and row.job.state != "done":
        return progress(row.job)
    if row.entry is not None:
        return joined(_local_facts(row, row.entry, machine, running))
    if row.folder is not None:
        return joined(_adapter_facts(row, row.folder))
    if row.offer is not None:
        return joined(_offer_facts(row.offer))
    if row.match is not None:
        return joined(_hub_facts(row.match, row.verdict))
    return row.verdict or TYPED.get(row.kind, "")


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


def bar(job: Job) -> str:
    """The progress bar of a download; empty if the download has ended, or if its size is not known yet."""
    if not job.total or job.state in ENDED:
        return ""
    return bar_text(job.received, job.total)


def bar_text(done: int, total: int, width: int = 24) -> str:
    """A progress bar as text."""
    filled = int(width * min(1.0, done / total)) if total else 0
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
    if speed > MAX_SPEED:
        return f"estimated over {MAX_SPEED:,} tok/s"
    return f"estimated {speed:.0f} tok/s" if speed >= 1 else "estimated under 1 tok/s"


def short_count(number: int) -> str:
    """A number as text in thousands or millions."""
    if number < 1000:
        return str(number)
    return f"{number / 1000:.0f} k" if number < 999_500 else f"{number / 1e6:.1f} M"


def joined(texts: Iterable[str]) -> str:
    """The texts that are not empty, on one line."""
    return " · ".join(text for text in texts if text)


def _local_facts(row: Row, entry: ModelEntry, machine: Machine, running: LoadedModel | None) -> list[str]:
    if entry.problem:
        return [one_line(f"cannot be used: {entry.problem}", MAX_LENGTH)]
    loaded = _loaded(entry, running)
    alias = f"alias {', '.join(row.aliases)}" if row.aliases else ""
    texts = [loaded, alias, "built-in, tiny" if entry.bundled else ""]
    texts.append(size(entry.size) if entry.size else "")
    texts.append(f"{entry.context:,} tokens" if entry.context else "")
    if not entry.bundled:
        texts.append("" if loaded else FITS[fit_of(int(entry.size * OVERHEAD), machine)])
        texts.append(speed_text(speed_of(entry.size, machine)))
    return texts


def _loaded(entry: ModelEntry, running: LoadedModel | None) -> str:
    if running is None:
        return "loaded" if entry.loaded else ""
    return f"loaded, {running.backend}" if running.state == "ready" else "loading"


def _adapter_facts(row: Row, folder: AdapterFolder) -> list[str]:
    return [
        "" if row.base else _missing_base(folder),
        f"rank {folder.rank}" if folder.rank else "",
        size(folder.size) if folder.size else "",
        "built-in" if folder.bundled else "",
    ]


def _missing_base(folder: AdapterFolder) -> str:
    if not folder.base:
        return "its base model is unknown"
    return f"its base model {one_line(folder.base)} is not on this machine"


def _offer_facts(offer: Offer) -> list[str]:
    return [
        size(offer.size) if offer.size else "",
        FITS[offer.fit],
        speed_text(offer.speed) if offer.fit in ("fits", "tight") else "",
        offer.licence,
        "needs an account" if offer.gated else "",
        offer.description,
    ]


def _hub_facts(match: HubMatch, verdict: str) -> list[str]:
    return [
        verdict,
        size(match.size) if match.size and not verdict else "",
        one_line(match.licence, 30),
        "needs an account" if match.gated else "",
        f"{short_count(match.downloads)} downloads" if match.downloads else "",
        f"{short_count(match.likes)} likes" if match.likes else "",
    ]
