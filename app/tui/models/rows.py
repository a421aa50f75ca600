"""The rows of the model screen: downloads, models on this machine, and models that can be downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from textual.fuzzy import Matcher

from ...client import AdapterFolder, Catalog, Job, ModelEntry, Offer, agree

Kind = Literal["download", "model", "suggestion", "offer", "name", "folder", "search"]
ENDED = ("done", "failed", "cancelled")  # states of a download that does not run any more
FOLDER_STARTS = ("/", "~", "./", "../")
HEADINGS: dict[Kind, str] = {
    "download": "Downloads",
    "model": "On this machine",
    "suggestion": "Suggested for this machine",
    "offer": "More models to download",
}


@dataclass(frozen=True)
class Row:
    """A row of the list. `key` identifies the row, and is its name for a download.

    `kind`: a `download` that runs or has failed, a `model` on this machine, a `suggestion` or another `offer` of the
    catalog; and for the text in the filter: the `name` of a repository, the path of a `folder`, or the `search` of the
    hub for this text.
    """

    key: str
    kind: Kind
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
        """True if a download of this row runs or is paused."""
        return self.job is not None and self.job.state not in ENDED


def rows(
    entries: Sequence[ModelEntry], catalog: Catalog, jobs: Sequence[Job], folders: Sequence[AdapterFolder]
) -> list[Row]:
    """Running and failed downloads, the models on this machine, then the models of the catalog, suggestions first."""
    by_name = {job.name: job for job in jobs}
    listed = [_local_row(entry, by_name.pop(entry.id, None), folders) for entry in entries]
    for offer in catalog.offers:
        if not offer.installed:
            listed.append(_offer_row(offer, by_name.pop(offer.name, None)))
    for name, job in by_name.items():
        if job.state != "done":
            listed.append(Row(name, "download", job=job))
    return sorted(listed, key=_order)


def _local_row(entry: ModelEntry, job: Job | None, folders: Sequence[AdapterFolder]) -> Row:
    adapters = tuple(folder.id for folder in folders if folder.base and agree(folder.base, entry.id))
    kind: Kind = "download" if _is_shown_as_download(job) else "model"
    return Row(entry.id, kind, entry=entry, job=job, adapters=adapters)


def _offer_row(offer: Offer, job: Job | None) -> Row:
    kind: Kind = "suggestion" if offer.suggested else "offer"
    if _is_shown_as_download(job):
        kind = "download"
    return Row(offer.name, kind, offer=offer, job=job)


def _is_shown_as_download(job: Job | None) -> bool:
    return job is not None and job.state not in ("done", "cancelled")


def _order(row: Row) -> tuple[int, bool]:
    """The sections in the order of their headings. In a section, models that are too large are last."""
    is_too_large = row.offer is not None and row.offer.fit == "too large"
    return (list(HEADINGS).index(row.kind), is_too_large)


def matching(listed: Sequence[Row], text: str) -> list[Row]:
    """The rows whose names match a typed text, best first, and the rows for the text itself."""
    matcher = Matcher(text)
    scores = {row.key: matcher.match(row.key) for row in listed}
    matches = [row for row in listed if scores[row.key] > 0]
    matches.sort(key=lambda row: scores[row.key], reverse=True)
    if text.startswith(FOLDER_STARTS):
        return [*matches, Row(text, "folder")]
    is_listed = any(row.key.lower() == text.lower() for row in matches)
    if "/" in text and not is_listed:
        matches.append(Row(text, "name"))
    return matches
