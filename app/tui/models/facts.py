"""The second line of a row of the model screen: the progress of a download, or the facts about a model."""

from __future__ import annotations

from ...client import AdapterFolder, HubMatch, Job, LoadedModel, Machine, ModelEntry, Offer, fit_of, speed_of
from ...sizes import size
from ..text import first_texts, joined, one_line, phrase
from .rows import ENDED, Row

OVERHEAD = 1.15  # memory of a model divided by the size of its weights, with a short context
MAX_SPEED = 1000  # tokens per second; above it, reads no longer limit the speed, so the estimate is useless
MAX_LENGTH = 300  # characters of an error
MAX_QUANTS = 6  # number of quantisations of a repository that are shown
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
    state = one_line(f"failed: {job.error}", MAX_LENGTH) if job.state == "failed" else STATES.get(job.state, job.state)
    return joined(
        [
            state,
            f"{job.received / job.total:.0%} of {size(job.total)}" if job.total else "",
            phrase("{}/s", size_text(job.speed)),
            f"{duration(job.eta)} left" if job.eta is not None else "",
        ]
    )


def advice(row: Row) -> str:
    """The line after the facts of a row with a failed download: the hint of the error, and the key that retries."""
    if row.job is None or not row.failed:
        return ""
    return one_line(joined([row.job.hint, "Enter tries again"]), MAX_LENGTH)


def bar(job: Job | None) -> str:
    """The progress bar of a download; empty if none runs, or if its size is not known yet."""
    if job is None or not job.total or job.state in ENDED:
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
    """A number as text in thousands or millions; empty if it is 0."""
    if number < 1000:
        return phrase("{}", number)
    return f"{number / 1000:.0f} k" if number < 999_500 else f"{number / 1e6:.1f} M"


def size_text(bytes: float) -> str:
    """A size as text; empty if it is 0, which stands for unknown."""
    return size(bytes) if bytes else ""


def tokens_text(context: int) -> str:
    """A context as text; empty if it is 0, which stands for unknown."""
    return phrase("{:,} tokens", context)


def _repair(problem: str) -> str:
    """The key that repairs a model with this problem."""
    if "localllm rm " in problem:  # imported files are on no hub
        return "Ctrl+X deletes it"
    return "Ctrl+D continues it" if problem.endswith(" continues it") else "Ctrl+D downloads it again"


def _local_facts(row: Row, entry: ModelEntry, machine: Machine, running: LoadedModel | None) -> list[str]:
    sizes = [size_text(entry.size), tokens_text(entry.context)]
    if entry.install:
        return ["needs llama.cpp", *sizes]
    if entry.problem:
        problem, _, _ = entry.problem.partition("; localllm ")  # the advice is a command; here it is a key
        return [one_line(f"cannot be used: {problem}", MAX_LENGTH), _repair(entry.problem)]
    loaded = _loaded(entry, running)
    names = [loaded, phrase("alias {}", ", ".join(row.aliases))]
    if entry.bundled:
        return [*names, "built-in, tiny", *sizes]
    fit = "" if loaded else FITS[fit_of(int(entry.size * OVERHEAD), machine)]
    return [*names, *sizes, fit, speed_text(speed_of(entry.size, machine))]


def _loaded(entry: ModelEntry, running: LoadedModel | None) -> str:
    if running is None:
        return phrase("loaded", entry.loaded)
    return f"loaded, {running.backend}" if running.state == "ready" else "loading"


def _adapter_facts(row: Row, folder: AdapterFolder) -> list[str]:
    missing = phrase("its base model {} is not on this machine", one_line(folder.base))
    return [
        "" if row.base else missing or "its base model is unknown",
        phrase("rank {}", folder.rank),
        size_text(folder.size),
        phrase("built-in", folder.bundled),
    ]


def _offer_facts(offer: Offer) -> list[str]:
    speed = speed_text(offer.speed) if offer.fit in ("fits", "tight") else ""
    gated = phrase(GATED, offer.gated)
    return [size_text(offer.size), FITS[offer.fit], speed, offer.licence, gated, offer.description]


def _hub_facts(match: HubMatch, verdict: str) -> list[str]:
    return [
        verdict or size_text(match.size),
        phrase(
            "GGUF {}", first_texts([one_line(quant, 30) for quant in match.quants], MAX_QUANTS)
        ),  # a filter can name one
        one_line(match.licence, 30),
        phrase(GATED, match.gated),
        phrase("{} downloads", short_count(match.downloads)),
        phrase("{} likes", short_count(match.likes)),
    ]
