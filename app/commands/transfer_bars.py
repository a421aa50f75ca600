"""Progress bars of a download on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from ..store.transfer.progress import FileProgress, Progress
from .console import safe

MAX_FILES = 4  # bars of files below the bar of the total
LABELS = {
    "waiting": "another process downloads it",
    "downloading": "total",
    "paused": "paused",
}


@contextmanager
def file_bar(visible: bool) -> Iterator[Callable[[str, int, int], None]]:
    """The function that shows the progress of one bar: name of the file, bytes of all files done and in total."""
    if not visible:
        yield lambda *_: None
        return
    with _bars() as bars:
        task = bars.add_task("", total=None)
        yield lambda name, done, total: bars.update(task, description=safe(name), completed=done, total=total)


def _bars() -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )


class Bars:
    """One bar for all files, and one for each of the files in transfer."""

    def __init__(self) -> None:
        self._bars = _bars()
        self._total: TaskID | None = None
        self._files: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        if self._total is None:
            self._total = self._bars.add_task("", total=progress.total)
        label = LABELS[progress.state]
        self._bars.update(self._total, description=label, completed=progress.received, total=progress.total)
        if progress.files_total > 1:
            self._show_files(progress.files[:MAX_FILES])

    def _show_files(self, files: tuple[FileProgress, ...]) -> None:
        names = {file.name for file in files}
        for name in [name for name in self._files if name not in names]:
            self._bars.remove_task(self._files.pop(name))
        for file in files:
            if file.name not in self._files:
                self._files[file.name] = self._bars.add_task(f"  {safe(file.name)}", total=file.size)
            self._bars.update(self._files[file.name], completed=file.received)
