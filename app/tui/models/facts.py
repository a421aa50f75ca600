"""The second line of a row of the model screen: the progress of a download, or the facts about a model."""

from __future__ import annotations

from ...client import AdapterFolder, HubMatch, Job, LoadedModel, Machine, ModelEntry, Offer, fit_of, speed_of
from ...sizes import size
from ..text import joined, one_line
from .rows import ENDED, Row

OVERHEAD = 1.15  # memory of a model divided by the size of its weights, with a short context
MAX_SPEED = 1000  # tokens per second; an estimate above it says nothing: other work than reads takes longer
MAX_LENGTH = 300  # characters of an error
MAX_QUANTS = 6  # of a repository, in the facts about it
FITS = {
    "fits": "fits this machine",
    "tight": "fits if other programs free memory",
    "too large": "too large for this machine",
    "unknown": "",
}
STATES = {
    "planning": "asking the hub",
    "waiting": "waiting for another download",
    "cancelled": "cancelled; a download continues it",
}
GATED = "needs an account"
TYPED = {
    "name": "Enter inspects it on the hub · Ctrl+D downloads it",
    "folder": "Enter adds the model at this path to localllm",
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
    texts = [STATES.get(job.state, job.state)]
    if job.state == "failed":
        texts = [one_line(f"failed: {job.error}", MAX_LENGTH)]
    if job.total:
        texts.append(f"{job.received / job.total:.0%} of {size(job.total)}")
    if job.speed:
        texts.append(f"{size(job.speed)}/s")
    if job.eta is not None:
        texts.append(f"{duration(job.eta)} left")
    return joined(texts)


def advice(row: Row) -> str:
    """The line after the facts of a row with a failed download: the hint of the error, and the key that retries."""
    if row.job is None or not row.failed:
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


def size_text(bytes: int) -> str:
    """A size as text; empty if it is 0, which stands for unknown."""
    return size(bytes) if bytes else ""


def tokens_text(context: int) -> str:
    """A context as text; empty if it is 0, which stands for unknown."""
    return f"{context:,} tokens" if context else ""


def _repair(problem: str) -> str:
    """The key that repairs a model with this problem."""
    if "localllm rm " in problem:  # imported files are on no hub
        return "Ctrl+X deletes it"
    return "Ctrl+D continues it" if problem.endswith(" continues it") else "Ctrl+D downloads it again"


def _local_facts(row: Row, entry: ModelEntry, machine: Machine, running: LoadedModel | None) -> list[str]:
    if entry.install:
        return ["needs llama.cpp", *_sizes(entry)]
    if entry.problem:
        problem, _, _ = entry.problem.partition("; localllm ")  # the advice is a command; here it is a key
        return [one_line(f"cannot be used: {problem}", MAX_LENGTH), _repair(entry.problem)]
    loaded = _loaded(entry, running)
    texts = [loaded]
    if row.aliases:
        texts.append(f"alias {', '.join(row.aliases)}")
    if entry.bundled:
        return [*texts, "built-in, tiny", *_sizes(entry)]
    texts += _sizes(entry)
    if not loaded:
        texts.append(FITS[fit_of(int(entry.size * OVERHEAD), machine)])
    return [*texts, speed_text(speed_of(entry.size, machine))]


def _sizes(entry: ModelEntry) -> list[str]:
    return [size_text(entry.size), tokens_text(entry.context)]


def _loaded(entry: ModelEntry, running: LoadedModel | None) -> str:
    if running is None:
        return "loaded" if entry.loaded else ""
    return f"loaded, {running.backend}" if running.state == "ready" else "loading"


def _adapter_facts(row: Row, folder: AdapterFolder) -> list[str]:
    texts = [] if row.base else [_missing_base(folder)]
    if folder.rank:
        texts.append(f"rank {folder.rank}")
    texts.append(size_text(folder.size))
    if folder.bundled:
        texts.append("built-in")
    return texts


def _missing_base(folder: AdapterFolder) -> str:
    if not folder.base:
        return "its base model is unknown"
    return f"its base model {one_line(folder.base)} is not on this machine"


def _offer_facts(offer: Offer) -> list[str]:
    texts = [size_text(offer.size), FITS[offer.fit]]
    if offer.fit in ("fits", "tight"):
        texts.append(speed_text(offer.speed))
    texts.append(offer.licence)
    if offer.gated:
        texts.append(GATED)
    return [*texts, offer.description]


def _hub_facts(match: HubMatch, verdict: str) -> list[str]:
    texts = [verdict or size_text(match.size), _quants(match), one_line(match.licence, 30)]
    if match.gated:
        texts.append(GATED)
    for number, unit in ((match.downloads, "downloads"), (match.likes, "likes")):
        if number:
            texts.append(f"{short_count(number)} {unit}")
    return texts


def _quants(match: HubMatch) -> str:
    """The quantisations of a repository with GGUF models; a text in the filter names one of them."""
    if not match.quants:
        return ""
    shown = ", ".join(one_line(quant, 30) for quant in match.quants[:MAX_QUANTS])
    more = len(match.quants) - MAX_QUANTS
    return f"GGUF {shown}" + (f" and {more} more" if more > 0 else "")
