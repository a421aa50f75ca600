"""Downloads in the background: states, pause, resume, cancel, errors. And the offers of the catalog."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.app.errors import DownloadFailed, InvalidRequest, ModelNotFound, Overloaded
from localllm.app.frames import Machine
from localllm.app.store.catalog import Entry
from localllm.app.store.offers import offers
from localllm.app.store.pull import jobs
from localllm.app.store.pull.jobs import Job, Jobs
from localllm.app.store.transfer.progress import Progress
from localllm.app.store.transfer.transfer import Cancelled

from ....waiting import HANG_SECONDS, wait_until


class FakeDownload:
    """Reports progress, then waits until `release` is set. `error`: raised by run."""

    def __init__(self, notify: Callable[[Progress], None], error: Exception | None = None) -> None:
        self.notify = notify
        self.error = error
        self.release = threading.Event()
        self.calls: list[str] = []

    def plan(self) -> Any:
        return SimpleNamespace(missing_bytes=100, missing=(1, 2), warning="")

    def run(self, plan: Any) -> Any:
        self.notify(Progress("downloading", 40, 100, 1, 2, (), 10.0, 6.0))
        assert self.release.wait(HANG_SECONDS)
        if "cancel" in self.calls:
            raise Cancelled("cancelled")
        if self.error is not None:
            raise self.error
        return SimpleNamespace(id="org/model", path=Path())

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def cancel(self) -> None:
        self.calls.append("cancel")
        self.release.set()


class Fixture:
    def __init__(self, error: Exception | None = None) -> None:
        self.downloads: list[FakeDownload] = []
        self.error = error
        self.jobs = Jobs(self.open)

    def open(self, name: str, notify: Callable[[Progress], None]) -> FakeDownload:
        if name == "bad":
            raise ModelNotFound("no short name 'bad'")
        self.downloads.append(FakeDownload(notify, self.error))
        return self.downloads[-1]

    def wait(self, state: str) -> Job:
        wait_until(lambda: self.jobs.list()[0].state == state, says=self.jobs.list)
        return self.jobs.list()[0]


def test_download_reports_its_progress_and_ends_with_the_model() -> None:
    fixture = Fixture()
    assert fixture.jobs.start("m").state == "planning"
    job = fixture.wait("downloading")
    assert (job.received, job.total, job.files_total, job.speed, job.eta) == (40, 100, 2, 10.0, 6.0)
    assert fixture.jobs.start("m").name == "m"  # the same download
    fixture.downloads[0].release.set()
    assert fixture.wait("done").model == "org/model"
    fixture.downloads[0].notify(Progress("downloading", 100, 100, 2, 2))  # a late report of a thread
    assert fixture.jobs.list()[0].state == "done"
    fixture.jobs.start("m")  # ended, so it starts again
    assert fixture.wait("downloading").received == 40
    fixture.downloads[-1].release.set()
    fixture.wait("done")


def test_download_is_paused_resumed_and_cancelled() -> None:
    fixture = Fixture()
    fixture.jobs.start("m")
    fixture.wait("downloading")
    assert fixture.jobs.pause("m").state == "paused"
    assert fixture.jobs.resume("m").state == "downloading"
    fixture.jobs.cancel("m")
    fixture.wait("cancelled")
    assert fixture.downloads[0].calls == ["pause", "resume", "cancel"]
    with pytest.raises(InvalidRequest, match="has ended: cancelled"):
        fixture.jobs.pause("m")
    with pytest.raises(ModelNotFound, match="no download of 'x'"):
        fixture.jobs.cancel("x")


def test_number_of_downloads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_UNFINISHED", 2)
    monkeypatch.setattr(jobs, "MAX_ENDED", 1)
    fixture = Fixture()
    fixture.jobs.start("a")
    fixture.jobs.start("b")
    with pytest.raises(Overloaded, match="2 downloads have not ended"):
        fixture.jobs.start("c")
    assert fixture.jobs.start("a").name == "a"
    for download in fixture.downloads:
        download.release.set()
    wait_until(lambda: all(job.state == "done" for job in fixture.jobs.list()))
    fixture.jobs.start("c")
    assert [job.name for job in fixture.jobs.list()] == ["b", "c"]
    fixture.downloads[0].notify(Progress("downloading", 100, 100, 2, 2))  # of the download that is forgotten
    assert [job.name for job in fixture.jobs.list()] == ["b", "c"]
    fixture.jobs.start("d")
    for download in fixture.downloads:
        download.release.set()


@pytest.mark.parametrize(
    ("error", "message"),
    [(DownloadFailed("the hub is away", hint="try later"), "the hub is away"), (RuntimeError("bug"), "unexpectedly")],
)
def test_error_ends_the_download_and_is_kept(error: Exception, message: str) -> None:
    fixture = Fixture(error)
    fixture.jobs.start("m")
    fixture.wait("downloading")
    fixture.downloads[0].release.set()
    job = fixture.wait("failed")
    assert message in job.error
    assert job.hint


def test_bad_name_starts_no_download() -> None:
    fixture = Fixture()
    with pytest.raises(ModelNotFound):
        fixture.jobs.start("bad")
    assert fixture.jobs.list() == []


def test_offers_fit_the_machine_and_three_are_suggested() -> None:
    entries = {f"m:{n}b": Entry(repository=f"org/m{n}", size=2.0 * n, memory=2.0 * n + 1) for n in (1, 2, 3, 4, 9, 40)}
    entries["gated:1b"] = Entry(repository="org/gated", size=1.0, memory=1.0, gated=True)
    entries["gguf:1b"] = Entry(repository="org/gguf", size=1.0, memory=1.0, formats=("gguf",))
    machine = Machine(memory=30 * 10**9, free=10 * 10**9, bandwidth=50e9)
    listed = {offer.name: offer for offer in offers(entries, machine, ["org/M3"])}
    assert not listed["gguf:1b"].suggested, "an installation may have no backend for GGUF files"
    assert {name: offer.fit for name, offer in listed.items() if name.startswith("m:")} == {
        "m:1b": "fits",
        "m:2b": "fits",
        "m:3b": "fits",
        "m:4b": "fits",
        "m:9b": "tight",
        "m:40b": "too large",
    }
    assert listed["m:2b"].speed == pytest.approx(12.5)
    assert listed["m:3b"].installed == "org/M3"
    assert {name for name, offer in listed.items() if offer.suggested} == {"m:1b", "m:2b", "m:4b"}


@pytest.mark.parametrize("bandwidth", [0.0, 1e9, 11e9])
def test_slow_machine_gets_the_smallest_models_as_suggestions(bandwidth: float) -> None:
    entries = {f"m:{n}b": Entry(repository=f"org/m{n}", size=2.0 * n, memory=2.0 * n) for n in (4, 3, 2, 1, 9)}
    listed = offers(entries, Machine(memory=10**10, free=10**10, bandwidth=bandwidth), [])
    assert {offer.name for offer in listed if offer.suggested} == {"m:1b", "m:2b", "m:3b"}


def test_unknown_machine_suggests_nothing() -> None:
    (offer,) = offers({"m:1b": Entry(repository="org/m", size=1.0, memory=2.0)}, Machine(), [])
    assert (offer.fit, offer.speed, offer.suggested) == ("unknown", 0.0, False)
