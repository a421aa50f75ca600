"""The rows of the model screen: downloads, models on this machine, and models that can be downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from textual.fuzzy import Matcher

from ...client import AdapterFolder, Catalog, HubMatch, Job, Machine, ModelEntry, Offer, agree

Kind = Literal["download", "model", "adapter", "suggestion", "offer", "result", "name", "folder", "search"]
ENDED = ("done", "failed", "cancelled")  # states of a download that does not run any more
FOLDER_STARTS = ("/", "~", "./", "../")
HEADINGS: dict[Kind, str] = {
    "download": "Downloads",
    "model": "On this machine",
    "adapter": "Adapters of models that are not on this machine",
    "suggestion": "Suggested for this machine",
    "offer": "More models to download",
}


@dataclass(frozen=True)
class Row:
    """A row of the list. `key` identifies the row.

    `kind`: a `download` that runs or has failed, a `model` or an `adapter` on this machine, a `suggestion` or another
    `offer` of the catalog; and for the text in the filter: a `result` of a search of the hub, the `name` of a
    repository, the path of a `folder`, or the `search` of the hub itself.
    """

    key: str
    kind: Kind
    entry: ModelEntry | None = None
    offer: Offer | None = None
    job: Job | None = None  # the latest download
    folder: AdapterFolder | None = None
    base: str = ""  # id of the base model of an adapter on this machine
    adapters: tuple[AdapterFolder, ...] = ()  # of a model on this machine
    aliases: tuple[str, ...] = ()
    match: HubMatch | None = None
    verdict: str = ""  # of the inspection of a model that is not on this machine; empty: not inspected

    @property
    def name(self) -> str:
        """The name of the model or the adapter in requests to the daemon."""
        return self.key if self.folder is None else self.folder.id

    @property
    def is_usable(self) -> bool:
        """True for a complete model on this machine, and for an adapter whose base model is on this machine."""
        is_model = self.entry is not None and not self.entry.problem
        return is_model or bool(self.base)

    @property
    def is_local(self) -> bool:
        """True for a model on this machine, which may be incomplete, and for an adapter."""
        return self.entry is not None or self.folder is not None

    @property
    def is_bundled(self) -> bool:
        is_bundled_adapter = self.folder is not None and self.folder.bundled
        return is_bundled_adapter or (self.entry is not None and self.entry.bundled)

    @property
    def size(self) -> int:
        """Bytes on disk of a model or an adapter on this machine."""
        if self.entry is not None:
            return self.entry.size
        return self.folder.size if self.folder is not None else 0

    @property
    def downloads(self) -> bool:
        """True if a download of this row runs or is paused."""
        return self.job is not None and self.job.state not in ENDED

    @property
    def failed(self) -> bool:
        """True if the latest download of this row has failed."""
        return self.job is not None and self.job.state == "failed"


@dataclass(frozen=True)
class Lists:
    """The lists of the daemon from which the rows are made. `aliases`: alias -> name of a model."""

    catalog: Catalog = field(default_factory=lambda: Catalog(machine=Machine(), offers=[]))
    entries: Sequence[ModelEntry] = ()
    jobs: Sequence[Job] = ()
    folders: Sequence[AdapterFolder] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HubResults:
    """The repositories that a search of the hub for `text` has returned."""

    text: str = ""
    matches: Sequence[HubMatch] = ()


def rows(lists: Lists) -> list[Row]:
    """Running and failed downloads, models on this machine with their adapters, then models of the catalog."""
    by_name = {job.name: job for job in lists.jobs}
    listed = [_local_row(entry, by_name.pop(entry.id, None), lists) for entry in lists.entries]
    for offer in lists.catalog.offers:
        if not offer.installed:
            listed.append(_offer_row(offer, by_name.pop(offer.name, None)))
    for name, job in by_name.items():
        if job.state != "done":
            listed.append(Row(name, "download", job=job))
    for folder in lists.folders:
        if not any(_belongs(folder, entry) for entry in lists.entries):
            listed.append(Row(folder.id, "adapter", folder=folder))
    complete = []
    for row in sorted(listed, key=_order):
        complete += [row, *_adapter_rows(row)]
    return complete


def _local_row(entry: ModelEntry, job: Job | None, lists: Lists) -> Row:
    adapters = tuple(folder for folder in lists.folders if _belongs(folder, entry))
    aliases = tuple(sorted(alias for alias, name in lists.aliases.items() if name == entry.id))
    kind: Kind = "download" if _is_shown_as_download(job) else "model"
    return Row(entry.id, kind, entry=entry, job=job, adapters=adapters, aliases=aliases)


def _belongs(folder: AdapterFolder, entry: ModelEntry) -> bool:
    return bool(folder.base) and agree(folder.base, entry.id)


def _adapter_rows(row: Row) -> list[Row]:
    """The rows of the adapters of a complete model."""
    if not row.is_usable:
        return []
    return [Row(f"{row.key} + {folder.id}", "adapter", folder=folder, base=row.key) for folder in row.adapters]


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


def matching(listed: Sequence[Row], text: str, hub: HubResults, verdicts: Mapping[str, str]) -> list[Row]:
    """The rows that match a typed text, best first, then the rows for the text itself.

    `verdicts`: name of a model -> verdict of its inspection.
    """
    matcher = fuzzy(text)
    scores = {row.key: _score(row, matcher) for row in listed}
    matches = [row for row in listed if scores[row.key] > 0]
    matches.sort(key=lambda row: scores[row.key], reverse=True)
    if text.startswith(FOLDER_STARTS):
        return [*matches, Row(text, "folder")]
    names = _names(matches)
    if "/" in text and text.lower() not in names:
        matches.append(Row(text, "name", verdict=verdicts.get(text, "")))
    if hub.text != text:
        return [*matches, Row(f"search {text}", "search")]
    by_name = {row.key.lower(): row for row in listed}
    for match in hub.matches:
        name = match.id.lower()
        if name not in names:
            result = Row(match.id, "result", match=match, verdict=verdicts.get(match.id, ""))
            matches.append(by_name.get(name, result))  # a downloaded result stays in the list
    return matches


def fuzzy(text: str) -> Matcher:
    """A matcher of names that have the characters of a typed text in this order, without its spaces."""
    return Matcher("".join(text.split()))


def _score(row: Row, matcher: Matcher) -> float:
    """How well the best name of a row matches; 0: not at all."""
    names = [row.key, *row.aliases]
    if row.offer is not None:
        names.append(row.offer.repository)
    return max(matcher.match(name) for name in names)


def _names(listed: Sequence[Row]) -> set[str]:
    """The lower-case names of all rows, with the repositories of the catalog."""
    names = {row.key.lower() for row in listed}
    return names | {row.offer.repository.lower() for row in listed if row.offer is not None}
