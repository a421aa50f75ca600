"""The plan of a download: which files of a repository, and how many bytes. Nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelUnusable
from ..hub.heads import with_hashes
from ..hub.lookup import lookup
from ..local.blobs import UNVERIFIED, blob_of, is_unverified
from ..local.ggufs import is_gguf
from ..names import FileAddress, HubName
from ..remote import RemoteFile, Repository
from ..selection import Selection, gguf_quant, gguf_quants, select, selects_gguf
from ..transfer.leftovers import Leftover, partials
from ..transfer.policy import Policy
from ..transfer.transfer import is_stored

MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a download."""

    repository: Repository
    kind: str  # model, adapter, gguf or file
    files: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]  # not in the snapshot
    note: str = ""  # the choice of a GGUF model that the name leaves open; empty: no choice

    @property
    def unverifiable(self) -> list[str]:
        """The names of the files without a hash at the hub: nothing vouches for their bytes."""
        return [file.name for file in self.files if not file.has_hash]

    @property
    def warning(self) -> str:
        """A sentence about the files without a hash; empty if every file has one."""
        count = len(self.unverifiable)
        names = ", ".join(self.unverifiable[-MAX_NAMES:])  # the weights are last
        text = (
            f"the server names no hash of {count} of {len(self.files)} files ({names}): nothing vouches for their bytes"
        )
        return text if count else ""

    @property
    def to_download(self) -> list[RemoteFile]:
        """The missing files that no other revision and no unfinished download has completed."""
        return [file for file in self.missing if not is_stored(self.repository.folder / "blobs", file)]

    @property
    def missing_bytes(self) -> int:
        """Bytes of the files to download."""
        return sum(file.size for file in self.to_download)

    @property
    def received_bytes(self) -> int:
        """Bytes of the files to download that an unfinished download has received."""
        keys = {file.key for file in self.to_download}
        return sum(leftover.received for leftover in partials(self.repository.folder) if leftover.key in keys)

    @property
    def existing_blobs(self) -> dict[str, str]:
        """File name → name of its blob, for the files that the snapshot has in their full size."""
        blobs = {}
        for file in self.files:
            blob = blob_of(self.repository.snapshot / file.name)
            if blob is not None and blob.is_file() and blob.stat().st_size == file.size:
                blobs[file.name] = blob.name
        return blobs

    @property
    def outdated(self) -> list[Leftover]:
        """The unfinished files of an earlier download of this revision that are not files of it any more."""
        files = self.repository.files
        names = {file.name for file in self.files}
        keys = {file.key for file in (*files, *self.files)}
        without_hash = {file.size for file in files if not file.has_hash and file.name not in names}
        return [
            leftover
            for leftover in partials(self.repository.folder)
            if leftover.key
            and leftover.key not in keys
            and leftover.revision in ("", self.repository.revision)
            and leftover.size not in without_hash
        ]

    @property
    def needed_bytes(self) -> int:
        """Bytes of disk space that the download needs. It first deletes the unfinished files that have changed."""
        outdated = sum(leftover.disk_bytes for leftover in self.outdated)
        return self.missing_bytes - self.received_bytes - outdated


def make_plan(name: HubName | FileAddress, policy: Policy, *, anyway: bool = False) -> Plan:
    """Ask the hub which files the model has. `anyway`: also a weight file that is no model.

    Raises ModelNotFound, ModelUnusable (no usable weights), DownloadFailed or InvalidRequest.
    """
    if isinstance(name, FileAddress):
        return _plan_of_file(name, policy, anyway)
    repository = lookup(name, policy)
    selection = select(name, repository.files)
    files = with_hashes(selection.files, policy)
    note = _note(name, repository, selection)
    return Plan(repository, selection.kind, tuple(files), tuple(missing_files(repository, files)), note)


def _plan_of_file(name: FileAddress, policy: Policy, anyway: bool) -> Plan:
    is_model = is_gguf(Path(name.file))
    if not is_model and not anyway:
        raise ModelUnusable(
            f"{name} is one weight file without config.json: localllm cannot run it",
            hint="pull the repository of the model, or add --anyway to download only the file",
        )
    repository = lookup(name, policy)
    kind = "gguf" if is_model else "file"
    return Plan(repository, kind, repository.files, tuple(missing_files(repository, repository.files)))


def missing_files(repository: Repository, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files that the snapshot does not have in their full size, or without the hash that the hub now names."""
    missing = []
    for file in files:
        link = repository.snapshot / file.name
        blob = blob_of(link)
        is_other = file.has_hash and blob is not None and is_unverified(blob) and blob.name != UNVERIFIED + file.key
        try:
            if link.stat().st_size == file.size and not is_other:
                continue
        except OSError:
            pass
        missing.append(file)
    return missing


def _note(name: HubName, repository: Repository, selection: Selection[RemoteFile]) -> str:
    """The choice of a quantisation for a name without a selector; empty if there is nothing to choose."""
    quants = gguf_quants(file.name for file in repository.files)
    if selection.kind != "gguf" or selects_gguf(name) or len(quants) < 2:
        return ""
    chosen = gguf_quant(selection.files[-1].name)
    others = ", ".join(quant for quant in quants if quant != chosen)
    return f"chose {name}:{chosen}; it also has {others}"
