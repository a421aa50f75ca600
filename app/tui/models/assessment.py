"""Whether this machine runs a model that is not downloaded: its inspection, and its fit on each backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...client import Fit, Inspection
from ...errors import AppError
from ..connection import Connection
from ..text import joined, one_line, phrase
from .facts import MAX_LENGTH, size_text, speed_text

MAX_REASON = 60  # characters of the reason of a refusal on one line with other facts


@dataclass(frozen=True)
class Assessment:
    """The facts about a model that the daemon reads from its headers, or the error that prevents this."""

    inspection: Inspection | None = None
    fits: tuple[Fit, ...] = ()
    error: AppError | None = None
    is_complete: bool = True  # False: the fit is not computed yet


async def assess(connection: Connection, name: str, keep: Callable[[Assessment], None]) -> None:
    """Inspect a model, then compute its fit. Errors are part of the result.

    `keep` gets the inspection as soon as it arrives, then the complete assessment: the fit takes longer.
    """

    inspection = None
    try:
        inspection = await connection.call(lambda client: client.inspect(name))
        is_complete = not inspection.usable or inspection.kind == "adapter"
        keep(Assessment(inspection, is_complete=is_complete))
        if not is_complete:
            keep(Assessment(inspection, tuple(await connection.call(lambda client: client.fit(name)))))
    except AppError as error:
        keep(Assessment(inspection, error=error))


def verdict(assessment: Assessment) -> str:
    """The assessment on one line."""
    inspection = assessment.inspection
    if inspection is None:
        assert assessment.error is not None
        return one_line(assessment.error.message, MAX_LENGTH)
    properties = [inspection.architecture, size_text(inspection.bytes), inspection.quantization]
    return one_line(joined([*_conclusion(assessment, inspection), *properties]), MAX_LENGTH)


def refusal(inspection: Inspection) -> str:
    """Why no backend of this machine runs the model; empty if one does."""
    if inspection.usable:
        return ""
    if inspection.problems:
        return inspection.problems[0]
    reasons = [f"{verdict.backend}: {verdict.says}" for verdict in inspection.backends if verdict.available]
    return "; ".join(reasons) or "no backend works on this machine"


def _conclusion(assessment: Assessment, inspection: Inspection) -> list[str]:
    if reason := refusal(inspection):
        return [f"cannot run here: {one_line(reason, MAX_REASON)}"]
    if inspection.kind == "adapter":
        return ["adapter" + phrase(" of {}", inspection.base)]
    if not assessment.fits:
        return [f"runs on {inspection.choice}"]
    best = min(assessment.fits, key=lambda fit: (not fit.fits, not fit.runs, fit.backend != inspection.choice))
    if not best.runs:
        return [f"cannot run on {best.backend}: {best.reason}"]
    if not best.fits:
        return [f"does not fit on {best.backend}: {best.reason}"]
    speed = speed_text(best.tokens_per_second or 0.0)
    return [f"fits on {best.backend}", f"context {best.largest_context:,}", speed]
