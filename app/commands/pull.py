"""`localllm pull`: lists the files of the download, and shows its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import click
import msgspec

from .. import config
from ..sizes import size
from ..store.hub.hubs import is_offline, offline_error
from ..store.local.finding import find
from ..store.local.refs import ModelRef
from ..store.pull.download import Download, check_space
from ..store.pull.plan import Plan
from ..store.resolved import outcome, use_of
from ..store.transfer.policy import from_environment
from ..store.transfer.progress import Progress
from .console import print_json, safe, say
from .transfer_bars import Bars

MIB = 2**20


def pull(names: Sequence[str], *, yes: bool, anyway: bool, as_json: bool, limit: float) -> int:
    """Download the files of models and adapters that are missing on this machine."""
    config.load()
    policy = replace(from_environment(), bandwidth=int(limit * MIB))
    downloads = [Download(name, policy=policy, anyway=anyway) for name in dict.fromkeys(names)]
    if is_offline():
        return _show_stored(downloads, as_json)
    plans = {download: download.plan() for download in downloads}
    for plan in plans.values():
        _show_plan(plan, as_json)
    check_space(sum(plan.needed_bytes for plan in plans.values()))  # for all together, before the first byte
    remaining = sum(plan.missing_bytes - plan.received_bytes for plan in plans.values())
    if not (yes or as_json or _confirms(remaining)):
        say("downloaded nothing")
        return 1
    for download, plan in plans.items():
        with _display(as_json) as download.notify, _message_of_interruption(download):
            download.warn = partial(_warn, as_json)
            model = download.run(plan)
        _show_result(model, as_json)
    return 0


def _show_stored(downloads: Sequence[Download], as_json: bool) -> int:
    for download in downloads:
        _show_result(_stored(download), as_json)
        say("offline mode is on: localllm did not compare it with the hub")
    return 0


def _confirms(remaining: int) -> bool:
    """Without a terminal, and without a byte to download, there is no question."""
    if not (remaining and sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    return click.confirm(f"Download {size(remaining)}?", default=True, err=True)


def _warn(as_json: bool, sentence: str) -> None:
    if as_json:
        _event("warning", text=sentence)
    else:
        say(safe(sentence))


@contextmanager
def _message_of_interruption(download: Download) -> Iterator[None]:
    """Say how to continue after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped; the same command continues the download of {download.name}")
        raise


def _stored(download: Download) -> ModelRef:
    """The complete model or adapter of a download. Raises DownloadFailed if it is not on this machine."""
    name = str(download.name)
    ref = find(name)
    if ref is None or not ref.is_complete:
        raise offline_error(name)
    return ref


def _show_plan(plan: Plan, as_json: bool) -> None:
    repository = plan.repository
    if as_json:
        _event(
            "plan",
            repository=repository.id,
            revision=repository.revision,
            commit=repository.commit,
            licence=repository.licence,
            files=[{"name": file.name, "size": file.size} for file in plan.files],
            missing_files=len(plan.to_download),
            missing_bytes=plan.missing_bytes,
            received_bytes=plan.received_bytes,
            unverifiable_files=plan.unverifiable,
        )
        return
    if plan.note:
        say(f"{plan.note}")
    if plan.to_download:
        licence = f", licence {safe(repository.licence)}" if repository.licence else ""
        received = f", {size(plan.received_bytes)} of it received before" if plan.received_bytes else ""
        count = f"{len(plan.to_download)} of {len(plan.files)} files"
        say(f"{repository.id}: {count} to download, {size(plan.missing_bytes)}{received}{licence}")
    if plan.warning:
        say(f"{repository.id}: {safe(plan.warning)}")


def _show_result(model: ModelRef, as_json: bool) -> None:
    if as_json:
        _event(
            "complete", model=model.id, path=str(model.path), size=model.size, **msgspec.structs.asdict(use_of(model))
        )
        return
    say(outcome(model, size(model.size)))


@contextmanager
def _display(as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """The function that shows progress: JSON lines, bars on a terminal, or nothing."""
    if as_json:
        yield _progress_event
    elif sys.stderr.isatty():
        with Bars() as bars:
            yield bars.show
    else:
        yield _waiting_notice()


def _waiting_notice() -> Callable[[Progress], None]:
    """A function that says once that the download waits for another process, so that a log shows the reason."""
    notices = iter(["another process downloads this model; waiting for it"])

    def notify(progress: Progress) -> None:
        if progress.state == "waiting":
            for notice in notices:
                say(notice)

    return notify


def _progress_event(progress: Progress) -> None:
    _event("progress", **asdict(progress))


def _event(kind: str, **fields: object) -> None:
    print_json({"event": kind, **fields}, indent=None)
