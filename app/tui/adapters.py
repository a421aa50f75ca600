"""The adapter screen: lists, loads, scales and unloads the adapters of a model, and selects one or two of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from ..client import RANGES, AdapterEntry, AdapterFolder, adapter_name, agree
from ..sizes import size
from . import selection
from .ask import AskScreen
from .connection import Connection
from .dialog import Dialog, ask
from .text import joined, one_line, phrase, visible

STEP = 0.1  # change of the scale by one key press
KEYS = "←/→ scale · s type a scale · c compare · l load a folder · u unload · Esc closes"


@dataclass(frozen=True)
class Choice:
    """The result of the adapter screen: the selection of an adapter (empty: the base model).

    `compares`: ask the next prompt of this selection and of the current one.
    """

    selection: str
    compares: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the list: an adapter that is loaded for the model, or that is on this machine.

    The base model has neither `entry` nor `folder`.
    """

    name: str
    entry: AdapterEntry | None = None
    folder: AdapterFolder | None = None


class Adapters(OptionList):
    """The list of adapters, with single-letter keys."""

    BINDINGS = [
        Binding("left,minus", "screen.scale(-1)", "Lower scale"),
        Binding("right,plus", "screen.scale(1)", "Higher scale"),
        Binding("s", "screen.type_scale", "Scale"),
        Binding("c", "screen.compare", "Compare"),
        Binding("l", "screen.load_folder", "Load a folder"),
        Binding("u,delete", "screen.unload", "Unload"),
    ]


class AdapterScreen(Dialog[Choice | None]):
    """Lists the adapters of a model. Returns the user's choice, or None if the user cancels."""

    BINDINGS = [("escape,f5", "dismiss(None)", "Close")]

    def __init__(self, connection: Connection, model: str, current: str, *, compares: bool = False) -> None:
        """`current`: the current selection. `compares`: Enter selects the adapter to compare with."""
        super().__init__()
        self._connection = connection
        self._model = model
        self._current, scale = selection.split(current) if current else ("", 1.0)
        self._compares = compares
        self._scales = {self._current: scale}
        self._folders: list[AdapterFolder] = []
        self._rows: list[Row] = []

    def compose(self) -> ComposeResult:
        title = f"Adapters of {one_line(self._model)}"
        if self._compares:
            title = f"Compare {selection.label(self._selection(self._current)) or 'the base model'} with:"
        enter = "Enter compares" if self._compares else "Enter uses it"
        yield self.frame(title, Adapters(markup=False), keys=f"{enter} · {KEYS}")

    def on_mount(self) -> None:
        self._fill(self._current)
        self._refresh()

    @work(exit_on_error=False)
    async def _refresh(self, highlighted: str | None = None) -> None:
        """Ask the daemon for the adapters, and fill the list."""
        try:
            self._folders = await self._connection.adapter_folders()
        finally:
            self._fill(self._highlighted().name if highlighted is None else highlighted)

    def _fill(self, highlighted: str) -> None:
        self._rows = rows(self._model, self._connection.adapters_of(self._model), self._folders)
        adapters = self.query_one(Adapters)
        adapters.set_options([Option(self._text(row)) for row in self._rows])
        names = [row.name for row in self._rows]
        adapters.highlighted = names.index(highlighted) if highlighted in names else 0

    def _text(self, row: Row) -> Content:
        mark = "● " if row.name == self._current else "  "
        if not row.name:
            return Content.assemble(mark, "none", ("  the base model alone", "dim"))
        scale = self._scales.get(row.name, 1.0)
        label = f"{visible(row.name)} ×{scale:g}" if row.entry else visible(row.name)
        return Content.assemble(mark, label, "\n    ", (facts(row, self._model), "dim"))

    def _highlighted(self) -> Row:
        index = self.query_one(Adapters).highlighted
        return self._rows[index or 0] if self._rows else Row("")

    def _selection(self, name: str) -> str:
        return selection.join(name, self._scales.get(name, 1.0)) if name else ""

    @on(OptionList.OptionSelected)
    def _use(self) -> None:
        self._choose(self._highlighted(), self._compares)

    def action_compare(self) -> None:
        row = self._highlighted()
        if self._selection(row.name) == self._selection(self._current):
            self.say("This is the current selection. Highlight another adapter to compare with.")
        else:
            self._choose(row, compares=True)

    @work(exclusive=True, group="choose", exit_on_error=False)
    async def _choose(self, row: Row, compares: bool) -> None:
        """Load the adapter if necessary, and close the screen."""
        name = row.name
        if row.folder is not None and row.entry is None:
            name = adapter_name(row.folder.id)
            await self._load(name, row.folder.id)
            self._scales[name] = self._scales.get(row.name, 1.0)
        self.dismiss(Choice(self._selection(name), compares))

    async def _load(self, name: str, path: str) -> None:
        self.say(f"Loading {name}…")
        await self._connection.load_adapter(self._model, name, path)
        self.say("")

    def action_scale(self, steps: int) -> None:
        row = self._highlighted()
        if row.entry is None:
            self.say("Only a loaded adapter has a scale. Enter loads and uses the highlighted adapter.")
            return
        limits = RANGES["adapter_scale"]
        scale = round(self._scales.get(row.name, 1.0) + steps * STEP, 3)
        if scale in limits:
            self._set_scale(row, scale)

    def _set_scale(self, row: Row, scale: float) -> None:
        self._scales[row.name] = scale
        adapters = self.query_one(Adapters)
        adapters.replace_option_prompt_at_index(self._rows.index(row), self._text(row))
        self.say("")

    @work(exit_on_error=False)
    async def action_type_scale(self) -> None:
        row = self._highlighted()
        if row.entry is None:
            self.action_scale(0)  # says the reason
            return
        value = f"{self._scales.get(row.name, 1.0):g}"
        typed = await ask(self, AskScreen(f"Scale of {row.name}", value))
        if typed is not None:
            _, scale = selection.split(f"{row.name}={typed}")
            self._set_scale(row, scale)

    @work(exit_on_error=False)
    async def action_load_folder(self) -> None:
        typed = await ask(self, AskScreen("Folder of the adapter, or org/repo of a downloaded one"))
        if typed is not None:
            path = folder_path(typed)
            name = adapter_name(path)
            await self._load(name, path)
            self._refresh(name)

    @work(exit_on_error=False)
    async def action_unload(self) -> None:
        row = self._highlighted()
        if row.entry is None:
            self.say("The highlighted adapter is not loaded.")
            return
        await self._connection.unload_adapter(self._model, row.name)
        self.say(f"Unloaded {row.name}.")
        self._refresh("")


def rows(model: str, entries: list[AdapterEntry], folders: list[AdapterFolder]) -> list[Row]:
    """The base model, its loaded adapters, then the adapters on this machine.

    Adapters that name another base model are last. The user can try them: the name may be that of a renamed copy.
    """
    by_path = {folder.path: folder for folder in folders}
    listed = [Row("")]
    listed += [Row(entry.name, entry, by_path.get(entry.path)) for entry in entries]
    loaded = {entry.path for entry in entries}
    unloaded = [folder for folder in folders if folder.path not in loaded and not folder.id.startswith("/")]
    unloaded.sort(key=lambda folder: not has_base(folder, model))
    return listed + [Row(folder.id, folder=folder) for folder in unloaded]


def has_base(folder: AdapterFolder, model: str) -> bool:
    """True if the adapter names `model` or a copy of it as its base, or names no base."""
    return not folder.base or agree(folder.base, model)


def facts(row: Row, model: str) -> str:
    """Where an adapter is, its rank and size, and its base model if that is not `model`."""
    entry = row.entry
    texts = []
    if entry is not None:
        texts = ["loaded", phrase("default of the daemon, ×{:g}", entry.scale)]
    if row.folder is not None:
        texts += _folder_facts(row.folder, model, is_loaded=entry is not None)
    return joined(texts)


def _folder_facts(folder: AdapterFolder, model: str, *, is_loaded: bool) -> list[str]:
    where = "" if is_loaded else "downloaded, not loaded"
    return [
        "built in" if folder.bundled else where,
        phrase("rank {}", folder.rank),
        phrase("{}", folder.size and size(folder.size)),
        "" if has_base(folder, model) else f"made for {one_line(folder.base, 40)}",
    ]


def folder_path(typed: str) -> str:
    """The absolute path of a typed folder. A text that is no folder, such as org/repo, is returned unchanged."""
    folder = Path(typed).expanduser()
    is_path = typed.startswith(("/", ".", "~")) or folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file())
    return str(folder.absolute()) if is_path else typed
