"""`localllm pull`: downloads the files of a model into the shared Hugging Face cache.

    plan    which files, how many bytes; nothing is written
    run     lock → disk space → config.json → check → all other files → check → snapshot → branch

Until the snapshot is published, `localllm list` and `localllm chat` use the old commit. One process at a time transfers
the files of a repository; others wait, and continue if it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ModelRefused
from .. import paths
from ..errors import ModelNotFound, ModelUnusable, StorageFailed
from ..sizes import size
from . import adapter_refs, cache
from .architectures import unsupported
from .blobs import blob_of
from .check import check
from .disk_errors import translate_disk_errors
from .ggufs import is_gguf
from .hubs import credentials
from .lookup import lookup
from .names import MAIN, FileAddress, HubName
from .ranges import range_requests
from .remote import RemoteFile, Repository
from .selection import Selection, gguf_quant, gguf_quants, select, selects_gguf
from .skeleton import skeleton
from .targets import remote_name
from .transfer import lock, publish
from .transfer.disk import Disk
from .transfer.leftovers import partials
from .transfer.policy import HEADROOM, Policy, from_environment
from .transfer.progress import Progress
from .transfer.transfer import Cancelled, Transfer, is_stored

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a download."""

    repository: Repository
    kind: str  # model, adapter, gguf or file
    files: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]  # not in the snapshot
    note: str = ""  # the choice of a GGUF model that the name leaves open; empty: no choice

    @property
    def to_download(self) -> list[RemoteFile]:
        """The missing files that no other revision and no unfinished download has completed."""
        return _without_blob(self.repository, self.missing)

    @property
    def missing_bytes(self) -> int:
        """Bytes of the files to download."""
        return sum(file.size for file in self.to_download)

    @property
    def received_bytes(self) -> int:
        """Bytes of the files to download that an unfinished download has received."""
        return min(_received(self.repository), self.missing_bytes)


class Download:
    """One download. `pause`, `resume` and `cancel` may be called by any thread."""

    def __init__(
        self,
        name: str,
        *,
        notify: Callable[[Progress], None] = lambda progress: None,
        policy: Policy | None = None,
        anyway: bool = False,
    ) -> None:
        self.name = remote_name(name)
        self.notify = notify
        self._policy = policy or from_environment()
        self._anyway = anyway
        self._disk = Disk()
        self._transfer: Transfer | None = None
        self._paused = False
        self._cancelled = False

    def plan(self) -> Plan:
        """Ask the hub which files the model has.

        Raises ModelNotFound, ModelUnusable (no usable weights), DownloadFailed or InvalidRequest.
        """
        name = self.name
        if isinstance(name, FileAddress):
            return self._plan_file(name)
        repository = lookup(name, self._policy)
        selection = select(name, repository.files)
        missing = _missing(repository, selection.files)
        note = _note(name, repository, selection)
        return Plan(repository, selection.kind, tuple(selection.files), tuple(missing), note)

    def _plan_file(self, name: FileAddress) -> Plan:
        is_model = is_gguf(Path(name.file))
        if not is_model and not self._anyway:
            raise ModelUnusable(
                f"{name} is one weight file without config.json: localllm cannot run it",
                hint="pull the repository of the model, or add --anyway to download only the file",
            )
        repository = lookup(name, self._policy)
        kind = "gguf" if is_model else "file"
        return Plan(repository, kind, repository.files, tuple(_missing(repository, repository.files)))

    def run(self, plan: Plan) -> cache.ModelRef:
        """Download the missing files, check and publish them.

        Raises DownloadFailed, StorageFailed, ModelUnusable (a model that no backend runs, or damaged files) or
        Cancelled.
        """
        with translate_disk_errors():
            with lock.locked(plan.repository.folder, self._disk, lambda: self._wait(plan)):
                self._run(plan)
            return self._resolve(plan)

    def pause(self) -> None:
        """Close all connections, and wait for `resume`."""
        self._paused = True
        if self._transfer:
            self._transfer.pause()

    def resume(self) -> None:
        self._paused = False
        if self._transfer:
            self._transfer.resume()

    def cancel(self) -> None:
        """End `run` with Cancelled. What has arrived stays on the disk."""
        self._cancelled = True
        if self._transfer:
            self._transfer.cancel()

    def _run(self, plan: Plan) -> None:
        repository = plan.repository
        missing = _missing(repository, plan.files)
        check_space(sum(file.size for file in _without_blob(repository, missing)) - _received(repository))
        transfer = self._start(repository, missing)
        first = [file for file in missing if file.name == CONFIG]
        transfer.fetch(first)
        if first:
            self._refuse_unsupported(repository, transfer)
        if plan.kind == "gguf" and missing:
            self._refuse_unsupported_gguf(plan)
        transfer.fetch([file for file in missing if file not in first])
        if missing:
            self._refuse_damaged(plan, transfer)
            publish.publish(repository.folder, repository.commit, transfer.blob_names, self._disk)
        revision = self.name.revision if isinstance(self.name, HubName) else ""
        if not cache.is_commit(revision or MAIN, repository.commit):
            publish.write_ref(repository.folder, revision or MAIN, repository.commit, self._disk)

    def _refuse_unsupported(self, repository: Repository, transfer: Transfer) -> None:
        """Raises ModelUnusable if no backend runs a model with this config.json."""
        if self._anyway:
            return
        staged = publish.stage(repository.folder, repository.commit, transfer.blob_names, self._disk)
        try:
            reason = unsupported(staged)
        except ModelRefused as error:
            reason = str(error)
        publish.discard_stage(repository.folder)
        self._refuse(reason)

    def _refuse_unsupported_gguf(self, plan: Plan) -> None:
        """Raises ModelUnusable if the header of a GGUF model is damaged, or if no backend runs the model."""
        if self._anyway:
            return
        files = [file for file in plan.files if is_gguf(Path(file.name))]
        try:
            with range_requests() as fetch, skeleton(files, fetch) as folder:
                reason = "".join(check(folder / files[0].name)[:1])
        except ModelRefused as error:
            reason = str(error)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        if reason:
            raise ModelUnusable(
                f"{self.name}: {reason}", hint="pull another model, or add --anyway to download this one all the same"
            )

    def _refuse_damaged(self, plan: Plan, transfer: Transfer) -> None:
        """Raises ModelUnusable if the complete files are damaged: they are as the hub has them, but no model."""
        if self._anyway:
            return
        repository = plan.repository
        blobs = _existing_blobs(plan) | transfer.blob_names
        problems = check(publish.stage(repository.folder, repository.commit, blobs, self._disk))
        publish.discard_stage(repository.folder)
        if problems:
            raise ModelUnusable(
                f"{self.name} is damaged on the hub: {problems[0]}",
                hint="pull another revision or model, or add --anyway to keep this one all the same",
            )

    def _start(self, repository: Repository, files: list[RemoteFile]) -> Transfer:
        transfer = Transfer(
            repository.folder,
            files,
            policy=self._policy,
            credentials=credentials(),
            notify=lambda progress: self.notify(progress),
            disk=self._disk,
        )
        self._transfer = transfer
        if self._paused:
            transfer.pause()
        if self._cancelled:
            transfer.cancel()
        return transfer

    def _wait(self, plan: Plan) -> None:
        """Another process downloads the repository: show its progress, from its journals."""
        if self._cancelled:
            raise Cancelled("the download was cancelled", hint="run the command again to continue")
        blobs = plan.repository.folder / "blobs"
        complete = [file for file in plan.missing if (blobs / file.key).is_file()]
        received = sum(file.size for file in complete) + _received(plan.repository)
        total = sum(file.size for file in plan.missing)
        self.notify(Progress("waiting", min(received, total), total, len(complete), len(plan.missing)))

    def _resolve(self, plan: Plan) -> cache.ModelRef:
        repository = plan.repository
        if plan.kind == "gguf":
            return _stored_gguf(plan)
        if plan.kind == "file":
            size_on_disk = sum(file.size for file in plan.files)
            return cache.ModelRef(str(self.name), repository.snapshot, revision=repository.commit, size=size_on_disk)
        resolve = adapter_refs.resolve if plan.kind == "adapter" else cache.resolve
        return resolve(f"{repository.id}@{repository.commit}")


def _note(name: HubName, repository: Repository, selection: Selection[RemoteFile]) -> str:
    """The choice of a quantisation for a name without a selector; empty if there is nothing to choose."""
    quants = gguf_quants(file.name for file in repository.files)
    if selection.kind != "gguf" or selects_gguf(name) or len(quants) < 2:
        return ""
    chosen = gguf_quant(selection.files[-1].name)
    others = ", ".join(quant for quant in quants if quant != chosen)
    return f"chose {name}:{chosen}; it also has {others}"


def _stored_gguf(plan: Plan) -> cache.ModelRef:
    """The downloaded GGUF model or adapter. Raises ModelNotFound if another process has deleted it."""
    repository = plan.repository
    model = cache.find_file(repository.folder, repository.snapshot / plan.files[-1].name)
    if model is None:
        raise ModelNotFound(f"{repository.id} was deleted meanwhile", hint="run the command again", param="model")
    return model


def check_space(needed: int) -> None:
    """Raises StorageFailed if the disk of the cache has less than `needed` bytes and a reserve."""
    folder = paths.hub_cache_dir()
    free = paths.disk_free(folder)
    if needed > 0 and needed + HEADROOM > free:
        message = f"not enough disk space: the download needs {size(needed)}, {folder} has {size(free)} free"
        raise StorageFailed(message, hint="free some space, or set HF_HOME to a larger disk", needed=needed, free=free)


def _missing(repository: Repository, files: list[RemoteFile] | tuple[RemoteFile, ...]) -> list[RemoteFile]:
    """The files that the snapshot does not have in their full size."""
    missing = []
    for file in files:
        try:
            if (repository.snapshot / file.name).stat().st_size == file.size:
                continue
        except OSError:
            pass
        missing.append(file)
    return missing


def _without_blob(repository: Repository, files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """The files that a transfer downloads: the folder of the repository has no complete blob of them."""
    blobs = repository.folder / "blobs"
    return [file for file in files if not is_stored(blobs, file)]


def _existing_blobs(plan: Plan) -> dict[str, str]:
    """File name → name of its blob, for the files that the snapshot has."""
    blobs = {}
    for file in plan.files:
        blob = blob_of(plan.repository.snapshot / file.name)
        if blob is not None and blob.exists():
            blobs[file.name] = blob.name
    return blobs


def _received(repository: Repository) -> int:
    """Bytes of unfinished files that are on the disk already."""
    return sum(leftover.received for leftover in partials(repository.folder))
