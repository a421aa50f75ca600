"""Whether this machine runs a model that is not downloaded: its inspection, and its fit on each backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...client import Client, Fit, Inspection
from ...errors import AppError
from ...sizes import size
from ..connection import Connection
from ..text import joined, one_line
from .facts import MAX_LENGTH, speed_text

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

    async def inspect(client: Client) -> Inspection:
        return await client.inspect(name)

    async def fit(client: Client) -> list[Fit]:
        return await client.fit(name)

    inspection = None
    try:
        inspection = await connection.call(inspect)
        if not inspection.usable or inspection.kind == "adapter":
            keep(Assessment(inspection))
            return
        keep(Assessment(inspection, is_complete=False))
        keep(Assessment(inspection, tuple(await connection.call(fit))))
    except AppError as error:
        keep(Assessment(inspection, error=error))


def verdict(assessment: Assessment) -> str:
    """The assessment on one line."""
    inspection = assessment.inspection
    if inspection is None:
        assert assessment.error is not None
        return one_line(assessment.error.message, MAX_LENGTH)
    return one_line(joined([*_conclusion(assessment, inspection), *_properties(inspection)]), MAX_LENGTH)


def refusal(inspection: Inspection) -> str:
    """Why no backend of this machine runs the model; empty if one does."""
    if inspection.usable:
        return ""
    if inspection.problems:
        return inspection.problems[0]
    reasons = [f"{verdict.backend}: {verdict.says}" for verdict in inspection.backends if verdict.available]
    return "; ".join(reasons) or "no backend works on this machine"


def _properties(inspection: Inspection) -> list[str]:
    quantization = inspection.quantization
    return [inspection.architecture, size(inspection.bytes) if inspection.bytes else "", quantization]


def _conclusion(assessment: Assessment, inspection: Inspection) -> list[str]:
    if reason := refusal(inspection):
        return [f"cannot run here: {one_line(reason, MAX_REASON)}"]
    if inspection.kind == "adapter":
        return [f"adapter of {inspection.base}" if inspection.base else "adapter"]
    fits = sorted(assessment.fits, key=lambda fit: (not fit.fits, not fit.runs, fit.backend != inspection.choice))
    if not fits:
        return [f"runs on {inspection.choice}"]
    best = fits[0]
    if not best.runs:
        return [f"cannot run on {best.backend}: {best.reason}"]
    if not best.fits:
        return [f"does not fit on {best.backend}: {best.reason}"]
    return [f"fits on {best.backend}", _context(best), speed_text(best.tokens_per_second or 0.0)]


def _context(fit: Fit) -> str:
    return f"context {fit.largest_context:,}"
