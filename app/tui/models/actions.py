"""The actions of the keys of the model screen. Each gets the screen and its highlighted row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from ...client import Imported, Verification
from ...errors import AppError
from ...sizes import size
from ..adapters import folder_path
from ..ask import AskScreen, ConfirmScreen
from ..dialog import ask
from ..text import one_line
from .details import DetailScreen
from .installing import InstallScreen
from .model_settings import ModelSettingsScreen
from .pruning import PruneScreen
from .work import OnFile, WorkScreen

if TYPE_CHECKING:
    from .rows import Row
    from .screen import ModelScreen

Action = Callable[["ModelScreen", "Row"], Awaitable[None]]
MAX_NAME = 100  # characters of a name in a question
MAX_PROBLEMS = 3  # problems of a verification in the notice


async def run(screen: ModelScreen, name: str) -> None:
    """Run the action of a key. Raises AppError."""
    if name in _GLOBAL_ACTIONS:
        await _GLOBAL_ACTIONS[name](screen)
    elif (row := screen.row) is not None:
        await _ROW_ACTIONS[name](screen, row)


# Section: use, download


async def _enter(screen: ModelScreen, row: Row) -> None:
    """Select a complete model, repeat a failed download, search, add a folder, or show the details of another model.

    Enter alone starts no download: the first match of a filter may be large, and not the intended model.
    """
    if row.is_usable:
        screen.use(row)
        return
    actions: dict[str, Action] = {"search": _search, "folder": _add_folder}
    if row.kind == "adapter":
        screen.say("Its base model is not on this machine. Download the base model first.")
    elif row.lacks_llamacpp:
        screen.say("It needs llama.cpp. Ctrl+L installs it.")
    elif row.failed:
        await _download(screen, row)
    else:
        await actions.get(row.kind, _details)(screen, row)


async def _search(screen: ModelScreen, row: Row) -> None:
    await screen.search()


async def _download(screen: ModelScreen, row: Row) -> None:
    if row.kind in ("search", "folder"):
        await _enter(screen, row)
        return
    if row.downloads:
        await _change(screen, row, "resume" if row.job is not None and row.job.state == "paused" else "pause")
        return
    if row.is_usable or row.folder is not None:
        screen.say("It is on this machine already. Enter uses it.")
        return
    if row.lacks_llamacpp:
        screen.say("It is on this machine already. Ctrl+L installs llama.cpp, which runs it.")
        return
    await screen.connection.download(row.name)
    screen.say(f"Downloading {row.name}. The download goes on if you close this screen or localllm.")
    screen.watch_downloads(row.key, started=row.name)


async def _change(screen: ModelScreen, row: Row, action: str) -> None:
    """Pause, resume or cancel a download."""
    await screen.connection.change_download(row.name, action)
    screen.say("")
    screen.fill()


# Section: facts


async def _details(screen: ModelScreen, row: Row) -> None:
    if row.kind in ("search", "folder"):
        screen.say("Highlight a model to see its details.")
        return
    assessment = screen.assessments.get(row.name)
    detail_screen = DetailScreen(screen.connection, row, assessment, partial(screen.keep_assessment, row.name))
    choice = await ask(screen, detail_screen)
    if choice == "use":
        screen.use(row)
    elif choice == "download":
        await _download(screen, row)


async def _verify(screen: ModelScreen, row: Row) -> None:
    """Compare the files of a model with their hashes."""
    if not row.is_local:
        screen.say("Only a model on this machine can be verified.")
        return
    result = await _work(screen, f"Verifying {row.name}", partial(_start_verify, screen, row.name))
    if isinstance(result, Verification):
        screen.say(_verified(row, result))


async def _start_verify(screen: ModelScreen, name: str, on_file: OnFile) -> Verification:
    return await screen.connection.call(lambda client: client.verify(name, on_progress=on_file))


def _verified(row: Row, result: Verification) -> str:
    if not result.ok:
        more = len(result.problems) - MAX_PROBLEMS
        problems = "; ".join(result.problems[:MAX_PROBLEMS]) + (f" and {more} more" if more > 0 else "")
        remedy = "Install localllm again." if row.is_bundled else "Delete it (Ctrl+X) and download it again."
        return f"{row.name}: {problems}. {remedy}"
    texts = []
    without_hash = sum(file.status == "unknown" for file in result.files)
    if compared := len(result.files) - without_hash:
        texts.append(f"{compared} files are correct")
    if without_hash:
        texts.append(f"{without_hash} files have no hash of a hub, so nothing vouches for their bytes")
    return f"{row.name}: {'; '.join(texts)}."


# Section: changes


async def _settings(screen: ModelScreen, row: Row) -> None:
    """Edit the settings of one model."""
    if row.entry is None:
        screen.say("Only a model on this machine has settings.")
        return
    name = row.name
    current = await screen.connection.call(lambda client: client.configure(name, {}))
    changes = await ask(screen, ModelSettingsScreen(name, current))
    if not changes:
        return
    await screen.connection.call(lambda client: client.configure(name, changes))
    screen.say(f"Saved. They apply when {name} is loaded next.")


async def _alias(screen: ModelScreen, row: Row) -> None:
    """Set, rename or remove the alias of a model."""
    if row.entry is None:
        screen.say("Only a model on this machine can have an alias here.")
        return
    name = row.name
    old = row.aliases[0] if row.aliases else ""
    question = f"Alias of {name}" + ("; empty: remove it" if old else "")
    alias = await ask(screen, AskScreen(question, old, allows_empty=bool(old)))
    if alias is None or alias == old:
        return
    if alias:
        await screen.connection.call(lambda client: client.set_alias(alias, name))
    if old:
        await screen.connection.call(lambda client: client.set_alias(old, None))
    screen.say(f"{alias} is now a name of {name}." if alias else f"Removed the alias {old}.")
    screen.refresh_lists(row.key)


async def _delete(screen: ModelScreen, row: Row) -> None:
    if row.downloads:
        await _change(screen, row, "cancel")
        return
    if not row.is_local:
        unfinished = " Ctrl+U deletes unfinished downloads." if row.job else ""
        screen.say(f"The highlighted model is not on this machine.{unfinished}")
        return
    if row.is_bundled or row.key == screen.current:
        reason = "built in" if row.is_bundled else "in use"
        screen.say(f"{row.name} is {reason}, so it cannot be deleted here.")
        return
    question = f"Delete {one_line(row.name, MAX_NAME)} and free {size(row.size)}?"
    if row.aliases:
        question += f" This also removes: alias {one_line(', '.join(row.aliases), MAX_NAME)}."
    if not await ask(screen, ConfirmScreen(question)):
        return
    await screen.connection.delete(row.name)
    screen.say(f"Deleted {row.name}.")
    screen.refresh_lists()


async def _add_folder(screen: ModelScreen, row: Row | None = None) -> None:
    """Add a model folder of this machine. The files stay in their folder."""
    typed = row.key if row is not None else await ask(screen, AskScreen("Folder of the model", "~/"))
    if typed is None:
        return
    folder = folder_path(typed)
    name = await ask(screen, AskScreen("Name in localllm: local/…", PurePath(folder).name))
    if name is None:
        return
    result = await _work(screen, f"Adding {folder}", partial(_start_import, screen, folder, name))
    if isinstance(result, Imported):
        screen.say(f"Added {result.id}. Its files stay in {folder}.")
        screen.clear_filter()
        screen.refresh_lists(result.id)


async def _start_import(screen: ModelScreen, folder: str, name: str, on_file: OnFile) -> Imported:
    return await screen.connection.call(lambda client: client.import_model(folder, name, on_progress=on_file))


async def _prune(screen: ModelScreen) -> None:
    freed = await ask(screen, PruneScreen(screen.connection))
    if freed is not None:
        screen.say(f"Freed {size(freed)}.")
        screen.refresh_lists()


async def _install(screen: ModelScreen) -> None:
    """Install llama.cpp. The models that need it can then be used at once."""
    if not any(entry.install for entry in screen.connection.entries):
        screen.say("No model here needs llama.cpp, or it is installed.")
        return
    question = "Install llama.cpp? It is compiled for this machine, which takes some minutes."
    if not await ask(screen, ConfirmScreen(question)):
        return
    is_installed = await ask(screen, InstallScreen(screen.connection))
    screen.say("llama.cpp is installed." if is_installed else "llama.cpp is not installed.")
    screen.refresh_lists()


async def _work(screen: ModelScreen, title: str, operation: Callable[[OnFile], Awaitable[object]]) -> object:
    """The result of a long operation; None if the user cancels. Raises AppError."""
    result = await ask(screen, WorkScreen(title, operation))
    if isinstance(result, AppError):
        raise result
    if result is None:
        screen.say("Cancelled.")
    return result


_ROW_ACTIONS: dict[str, Action] = {
    "enter": _enter,
    "download": _download,
    "details": _details,
    "verify": _verify,
    "settings": _settings,
    "alias": _alias,
    "delete": _delete,
}
_GLOBAL_ACTIONS: dict[str, Callable[[ModelScreen], Awaitable[None]]] = {
    "add_folder": _add_folder,
    "prune": _prune,
    "install": _install,
}
