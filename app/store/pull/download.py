"""`localllm pull`: downloads the files of a model into the shared Hugging Face cache.

    plan    which files, how many bytes; nothing is written
    run     lock → disk space → config.json → check → other small files → check with headers → weights → snapshot
            → branch

Until the snapshot is published, `localllm list` and `localllm chat` use the old commit. One process at a time transfers
the files of a repository; others wait, and continue if it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ....engine.files.config_files import CONFIG_FILES
from ...errors import ModelNotFound, ModelUnusable
from .. import disk_errors
from ..disk_errors import translate_disk_errors
from ..hub.hubs import credentials
from ..hub.ranges import Ranges, range_requests
from ..hub.targets import remote_name
from ..local import snapshots
from ..local.refs import ModelRef
from ..names import MAIN, WEIGHT_FILES, HubName
from ..remote import RemoteFile, Repository
from ..transfer import lock, publish
from ..transfer.disk import Disk
from ..transfer.failures import Interrupted
from ..transfer.policy import Policy, from_environment
from ..transfer.progress import Progress
from ..transfer.transfer import Cancelled, Transfer
from .early_check import check_headers, hint_of_problem, problem_without_headers
from .plan import Plan, make_plan, missing_files


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
        self.warn: Callable[[str], None] = lambda sentence: None
        self._policy = policy or from_environment()
        self._anyway = anyway
        self._disk = Disk()
        self._transfer: Transfer | None = None
        self._ranges: Ranges | None = None
        self._paused = False
        self._cancelled = False

    def plan(self) -> Plan:
        """Ask the hub which files the model has.

        Raises ModelNotFound, ModelUnusable (no usable weights), DownloadFailed or InvalidRequest.
        """
        return make_plan(self.name, self._policy, anyway=self._anyway)

    def run(self, plan: Plan) -> ModelRef:
        """Download the missing files, check and publish them.

        Raises DownloadFailed, StorageFailed, ModelUnusable (a model that no backend runs, or damaged files) or
        Cancelled.
        """
        if self._is_published(plan):  # the cache may be read-only
            return self._resolve(plan)
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
        if self._ranges:
            self._ranges.interrupt()

    def _run(self, plan: Plan) -> None:
        repository = plan.repository
        for leftover in plan.outdated:
            for path in leftover.paths:
                self._disk.remove(path)
        check_space(plan.needed_bytes)
        missing = missing_files(repository, plan.files)
        transfer = self._start(repository, missing)
        config, small, weights = _parts(missing)
        transfer.fetch(config)
        if missing and not self._anyway:
            names = [file.name for file in plan.files]
            self._refuse(plan, transfer, problem_without_headers(plan.kind, names, _here(plan, transfer)))
        transfer.fetch(small)
        if missing and not self._anyway:
            self._check_headers(plan, transfer)
        transfer.fetch(weights)
        if missing:
            publish.publish(repository.folder, repository.commit, transfer.blob_names, self._disk)
        if not snapshots.is_commit(revision := self._revision, repository.commit):
            publish.write_ref(repository.folder, revision, repository.commit, self._disk)

    @property
    def _revision(self) -> str:
        """The branch, tag or commit in the name of the model, else the main branch."""
        return (isinstance(self.name, HubName) and self.name.revision) or MAIN

    def _is_published(self, plan: Plan) -> bool:
        """True if every file is in the snapshot, the branch names it, and no unfinished file has changed."""
        repository = plan.repository
        commit = snapshots.refs(repository.folder).get(self._revision, self._revision)
        return snapshots.is_commit(commit, repository.commit) and not (plan.missing or plan.outdated)

    def _check_headers(self, plan: Plan, transfer: Transfer) -> None:
        """Raises ModelUnusable for a model with a problem. Warns of a chat template that fails."""
        with range_requests(self._policy) as self._ranges:
            if self._cancelled:
                self._ranges.interrupt()
            try:
                result = check_headers(plan.files, _here(plan, transfer), self._ranges)
            except Interrupted as error:
                raise _cancelled() from error
        self._refuse(plan, transfer, result.problem)
        if result.template:
            self.warn(f"{self.name}: its chat template fails, so it cannot chat: {result.template}")

    def _refuse(self, plan: Plan, transfer: Transfer, problem: str) -> None:
        """Raises ModelUnusable for a model with a problem, and deletes the files that have arrived for it."""
        if not problem:
            return
        hint = hint_of_problem(str(self.name), _here(plan, transfer))
        publish.discard(plan.repository.folder, transfer.blob_names.values())
        hint = f"{hint}, or add --anyway to download this one all the same"
        raise ModelUnusable(f"{self.name}: {problem}", hint=hint)

    def _start(self, repository: Repository, files: list[RemoteFile]) -> Transfer:
        transfer = Transfer(
            repository.folder,
            files,
            policy=self._policy,
            credentials=credentials(),
            notify=lambda progress: self.notify(progress),
            disk=self._disk,
            revision=repository.revision,
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
            raise _cancelled()
        blobs = plan.repository.folder / "blobs"
        complete = [file for file in plan.missing if (blobs / file.key).is_file()]
        received = sum(file.size for file in complete) + plan.received_bytes
        total = sum(file.size for file in plan.missing)
        self.notify(Progress("waiting", min(received, total), total, len(complete), len(plan.missing)))

    def _resolve(self, plan: Plan) -> ModelRef:
        """The files of the download. Raises ModelNotFound if another process has deleted them."""
        repository = plan.repository
        if plan.kind == "file":
            size = sum(file.size for file in plan.files)
            return ModelRef(str(self.name), repository.snapshot, "weights", revision=repository.commit, size=size)
        last = repository.snapshot / plan.files[-1].name
        for ref in snapshots.contents_of(repository.folder):
            is_kind = ref.kind == plan.kind or (plan.kind == "gguf" and ref.is_gguf)
            if is_kind and ref.folder == repository.snapshot and (last in ref.weight_files or not ref.is_gguf):
                return ref
        raise ModelNotFound(f"{repository.id} was deleted meanwhile", hint="run the command again", param="model")


def check_space(needed: int) -> None:
    """Raises StorageFailed if the disk of the cache has less than `needed` bytes and a reserve."""
    disk_errors.check_space(needed, "the download", "free some space, or set HF_HOME to a larger disk")


def _parts(files: Sequence[RemoteFile]) -> tuple[list[RemoteFile], list[RemoteFile], list[RemoteFile]]:
    """The configuration, the other small files, and the weights."""
    weights = [file for file in files if file.name.lower().endswith(WEIGHT_FILES)]
    config = [file for file in files if file.name in CONFIG_FILES]
    return config, [file for file in files if file not in config and file not in weights], weights


def _here(plan: Plan, transfer: Transfer) -> dict[str, Path]:
    """Name → path of the files of a download that are on this machine."""
    names = plan.existing_blobs | transfer.blob_names
    return {name: plan.repository.folder / "blobs" / blob for name, blob in names.items()}


def _cancelled() -> Cancelled:
    return Cancelled("the download was cancelled", hint="run the command again to continue")
