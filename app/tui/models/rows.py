"""The rows of the model screen: downloads, models on this machine, and models that can be downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
    base: str = ""  # id of the base model of an adapter; empty if it is not on this machine
    adapters: tuple[AdapterFolder, ...] = ()  # of a model on this machine
    aliases: tuple[str, ...] = ()
    match: HubMatch | None = None
    verdict: str = ""  # of the inspection of a model that is not on this machine; empty: not inspected

    @property
    def name(self) -> str:
        """The name of the model or the adapter in requests to the daemon."""
        return self.key if self.folder is None else self.folder.id

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a filter can match."""
        return (self.key, *self.aliases) if self.offer is None else (self.key, *self.aliases, self.offer.repository)

    @property
    def files(self) -> ModelEntry | AdapterFolder | None:
        """The model or the adapter on this machine. A model may be incomplete."""
        return self.entry or self.folder

    @property
    def is_local(self) -> bool:
        return self.files is not None

    @property
    def is_usable(self) -> bool:
        """True for a complete model on this machine, and for an adapter of one."""
        return bool(self.base) or (self.entry is not None and not self.entry.problem)

    @property
    def is_bundled(self) -> bool:
        return self.files is not None and self.files.bundled

    @property
    def is_adapter(self) -> bool:
        return self.folder is not None

    @property
    def lacks_llamacpp(self) -> bool:
        """True for a GGUF model that llama.cpp would run if it were installed."""
        return self.entry is not None and bool(self.entry.install)

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
    offers = _offer_rows(lists, jobs)
    downloads = {row.offer.repository for row in offers if row.offer is not None and row.kind == "download"}
    entries = [entry for entry in lists.entries if not entry.problem or entry.id not in downloads]
    models = [_local_row(entry, jobs.pop(entry.id, None), lists) for entry in entries]
    others = [Row(job.name, "download", job=job) for job in jobs.values() if job.state != "done"]
    listed = sorted([*offers, *models, *others, *_adapters_without_base(lists)], key=_order)
    return list(chain.from_iterable((row, *_adapters_of(row)) for row in listed))


def _adapters_without_base(lists: Lists) -> list[Row]:
    bases = {folder.id for entry in lists.entries for folder in lists.folders if _belongs(folder, entry)}
    return [Row(folder.id, "adapter", folder=folder) for folder in lists.folders if folder.id not in bases]


def _local_row(entry: ModelEntry, job: Job | None, lists: Lists) -> Row:
    return Row(
        entry.id,
        _kind(job, "model"),
        entry=entry,
        job=job,
        adapters=tuple(folder for folder in lists.folders if _belongs(folder, entry)),
        aliases=tuple(sorted(alias for alias, name in lists.aliases.items() if name == entry.id)),
    )


def _offer_rows(lists: Lists, jobs: dict[str, Job]) -> list[Row]:
    """The models of the catalog that have no files on this machine, or that are downloaded now. Pops their jobs."""
    local = {entry.id for entry in lists.entries}
    listed = []
    for offer in lists.catalog.offers:
        job = jobs.pop(offer.name, None)
        row = Row(offer.name, _kind(job, "suggestion" if offer.suggested else "offer"), offer=offer, job=job)
        if not offer.installed and (row.kind == "download" or offer.repository not in local):
            listed.append(row)
    return listed


def _kind(job: Job | None, kind: Kind) -> Kind:
    """The kind of a row with a download: `download` if this runs or has failed."""
    return kind if job is None or job.state in ("done", "cancelled") else "download"


def _adapters_of(row: Row) -> list[Row]:
    """The rows of the adapters of a complete model."""
    adapters = row.adapters if row.is_usable else ()
    return [Row(f"{row.key} + {folder.id}", "adapter", folder=folder, base=row.key) for folder in adapters]


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
    scores = {row.key: max(map(matcher.match, row.names)) for row in listed}
    matches = sorted((row for row in listed if scores[row.key]), key=lambda row: scores[row.key], reverse=True)
    if text.startswith(FOLDER_STARTS):
        return [*matches, Row(text, "folder")]
    names = {name.lower() for row in matches for name in row.names}
    if "/" in text and text.lower() not in names:
        matches.append(Row(text, "name", verdict=verdicts.get(text, "")))
    if hub.text != text:
        return [*matches, Row(f"search {text}", "search")]
    return matches + _results(listed, hub, names, verdicts)


def _results(listed: Sequence[Row], hub: HubResults, names: set[str], verdicts: Mapping[str, str]) -> list[Row]:
    """The rows of a search of the hub, without the models in `names`. A downloaded result stays in the list."""
    by_name = {row.key.lower(): row for row in listed}
    others = [match for match in hub.matches if match.id.lower() not in names]
    results = [Row(match.id, "result", match=match, verdict=verdicts.get(match.id, "")) for match in others]
    return [by_name.get(row.key.lower(), row) for row in results]


def fuzzy(text: str) -> Matcher:
    """A matcher of names that have the characters of a typed text in this order, without its spaces."""
    return Matcher("".join(text.split()))
