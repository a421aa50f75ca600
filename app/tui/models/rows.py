"""The rows of the model screen: downloads, models on this machine, and models that can be downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    base: str = ""  # of an adapter: id of its base model, if this is on this machine
    is_usable: bool = False  # a complete model on this machine, or an adapter of one
    is_bundled: bool = False
    size: int = 0  # bytes on disk of a model or an adapter on this machine
    adapters: tuple[AdapterFolder, ...] = ()  # of a model on this machine
    aliases: tuple[str, ...] = ()
    match: HubMatch | None = None
    verdict: str = ""  # of the inspection of a model that is not on this machine; empty: not inspected

    @property
    def name(self) -> str:
        """The name of the model or the adapter in requests to the daemon."""
        return self.key if self.folder is None else self.folder.id

    @property
    def lacks_llamacpp(self) -> bool:
        """True for a GGUF model that llama.cpp would run if it were installed."""
        return self.entry is not None and bool(self.entry.install)

    @property
    def is_local(self) -> bool:
        """True for a model on this machine, which may be incomplete, and for an adapter."""
        return self.entry is not None or self.folder is not None

    @property
    def downloads(self) -> bool:
        """True if a download of this row runs or is paused."""
        return self.job is not None and self.job.state not in ENDED

    @property
    def is_paused(self) -> bool:
        return self.job is not None and self.job.state == "paused"

    @property
    def is_typed(self) -> bool:
        """True for a row that stands for the text in the filter: a folder, or a search."""
        return self.kind in ("search", "folder")

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
    jobs = {job.name: job for job in lists.jobs}
    listed = _offer_rows(lists, jobs)
    downloads = {row.offer.repository for row in listed if row.offer is not None and row.kind == "download"}
    for entry in lists.entries:
        is_shown_by_download = bool(entry.problem) and entry.id in downloads
        if not is_shown_by_download:
            listed.append(_local_row(entry, jobs.pop(entry.id, None), lists))
    listed += _other_downloads(jobs.values())
    listed += _adapters_without_base(lists)
    complete = []
    for row in sorted(listed, key=_order):
        complete.append(row)
        complete += _adapters_of(row)
    return complete


def _local_row(entry: ModelEntry, job: Job | None, lists: Lists) -> Row:
    return Row(
        entry.id,
        _kind(job, "model"),
        entry=entry,
        job=job,
        adapters=tuple(folder for folder in lists.folders if _belongs(folder, entry)),
        aliases=tuple(sorted(alias for alias, name in lists.aliases.items() if name == entry.id)),
        is_usable=not entry.problem,
        is_bundled=entry.bundled,
        size=entry.size,
    )


def _offer_rows(lists: Lists, jobs: dict[str, Job]) -> list[Row]:
    """The models of the catalog that have no files on this machine, or that are downloaded now. Pops their jobs."""
    local = {entry.id for entry in lists.entries}
    listed = []
    for offer in lists.catalog.offers:
        row = _offer_row(offer, jobs.pop(offer.name, None))
        is_shown = row.kind == "download" or offer.repository not in local
        if is_shown and not offer.installed:
            listed.append(row)
    return listed


def _offer_row(offer: Offer, job: Job | None) -> Row:
    kind: Kind = "suggestion" if offer.suggested else "offer"
    return Row(offer.name, _kind(job, kind), offer=offer, job=job)


def _kind(job: Job | None, kind: Kind) -> Kind:
    """The kind of a row with a download: `download` if this runs or has failed."""
    if job is None or job.state in ("done", "cancelled"):
        return kind
    return "download"


def _other_downloads(jobs: Iterable[Job]) -> list[Row]:
    """The downloads of models that are neither on this machine nor in the catalog."""
    return [Row(job.name, "download", job=job) for job in jobs if job.state != "done"]


def _adapters_without_base(lists: Lists) -> list[Row]:
    listed = []
    for folder in lists.folders:
        if not any(_belongs(folder, entry) for entry in lists.entries):
            listed.append(_adapter_row(folder.id, folder))
    return listed


def _adapters_of(row: Row) -> list[Row]:
    """The rows of the adapters of a complete model."""
    if not row.is_usable:
        return []
    return [_adapter_row(f"{row.key} + {folder.id}", folder, base=row.key) for folder in row.adapters]


def _adapter_row(key: str, folder: AdapterFolder, base: str = "") -> Row:
    return Row(
        key,
        "adapter",
        folder=folder,
        base=base,
        is_usable=bool(base),
        is_bundled=folder.bundled,
        size=folder.size,
    )


def _belongs(folder: AdapterFolder, entry: ModelEntry) -> bool:
    has_same_format = folder.path.lower().endswith(".gguf") == entry.gguf
    return has_same_format and bool(folder.base) and agree(folder.base, entry.id)


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
