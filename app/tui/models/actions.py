"""The actions of the keys of the model screen. Each gets the list of models and its highlighted row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import PurePath

from ...client import Imported, Verification
from ...errors import AppError
from ...sizes import size
from ..adapters import folder_path
from ..ask import AskScreen, ConfirmScreen
from ..dialog import Result
from ..text import one_line
from .browser import Browser
from .details import DetailScreen
from .model_settings import ModelSettingsScreen
from .pruning import PruneScreen
from .rows import Row
from .work import InstallScreen, OnFile, WorkScreen

Action = Callable[[Browser, Row], Awaitable[None]]
MAX_NAME = 100  # characters of a name in a question
MAX_PROBLEMS = 3  # problems of a verification in the notice


async def run(browser: Browser, name: str) -> None:
    """Run the action of a key. Raises AppError."""
    row = browser.row
    if name in _GLOBAL_ACTIONS:
        await _GLOBAL_ACTIONS[name](browser)
    elif row is not None and (reason := refusal(name, row, browser.current)):
        browser.say(reason)
    elif row is not None:
        await _ROW_ACTIONS[name](browser, row)


def refusal(action: str, row: Row, current: str) -> str:
    """Why an action is not possible for a row; empty if it is possible. `current`: the model of the conversation."""
    if action in ("settings", "alias") and row.entry is None:
        return f"Only a model on this machine {'has settings' if action == 'settings' else 'can have an alias here'}."
    if action == "verify" and not row.is_local:
        return "Only a model on this machine can be verified."
    if action == "details" and row.is_typed:
        return "Highlight a model to see its details."
    return _refusal_to_delete(row, current) if action == "delete" else ""


def _refusal_to_delete(row: Row, current: str) -> str:
    if row.downloads:
        return ""
    if not row.is_local:
        unfinished = " Ctrl+U deletes unfinished downloads." if row.job else ""
        return f"The highlighted model is not on this machine.{unfinished}"
    reason = "built in" if row.is_bundled else "in use"
    return f"{row.name} is {reason}, so it cannot be deleted here." if row.is_bundled or row.key == current else ""


# Section: use, download


async def _enter(browser: Browser, row: Row) -> None:
    """Select a complete model, repeat a failed download, search, add a folder, or show the details of another model.

    Enter alone starts no download: the first match of a filter may be large, and not the intended model.
    """
    actions: dict[str, Action] = {"search": _search, "folder": _add_folder}
    if row.is_usable:
        browser.use(row)
    elif row.kind == "adapter":
        browser.say("Its base model is not on this machine. Download the base model first.")
    elif row.lacks_llamacpp:
        browser.say("It needs llama.cpp. Ctrl+L installs it.")
    elif row.failed:
        await _download(browser, row)
    else:
        await actions.get(row.kind, _details)(browser, row)


async def _search(browser: Browser, row: Row) -> None:
    await browser.search()


async def _download(browser: Browser, row: Row) -> None:
    if row.is_typed:
        await _enter(browser, row)
    elif row.downloads:
        await _change(browser, row, "resume" if row.is_paused else "pause")
    elif row.is_usable or row.folder is not None:
        browser.say("It is on this machine already. Enter uses it.")
    elif row.lacks_llamacpp:
        browser.say("It is on this machine already. Ctrl+L installs llama.cpp, which runs it.")
    else:
        await browser.connection.download(row.name)
        browser.say(f"Downloading {row.name}. The download goes on if you close this screen or localllm.")
        browser.watch_downloads(row.key, started=row.name)


async def _change(browser: Browser, row: Row, action: str) -> None:
    """Pause, resume or cancel a download."""
    await browser.connection.change_download(row.name, action)
    browser.say("")
    browser.fill()


# Section: facts


async def _details(browser: Browser, row: Row) -> None:
    keep = partial(browser.keep_assessment, row.name)
    choice = await browser.ask(DetailScreen(browser.connection, row, browser.assessments.get(row.name), keep))
    if choice == "use":
        browser.use(row)
    elif choice == "download":
        await _download(browser, row)


async def _verify(browser: Browser, row: Row) -> None:
    """Compare the files of a model with their hashes."""

    async def verify(on_file: OnFile) -> Verification:
        return await browser.connection.call(lambda client: client.verify(row.name, on_progress=on_file))

    result = await _work(browser, WorkScreen(f"Verifying {row.name}", verify))
    if result is not None:
        browser.say(_verified(row, result))


def _verified(row: Row, result: Verification) -> str:
    if not result.ok:
        more = len(result.problems) - MAX_PROBLEMS
        problems = "; ".join(result.problems[:MAX_PROBLEMS]) + (f" and {more} more" if more > 0 else "")
        remedy = "Install localllm again." if row.is_bundled else "Delete it (Ctrl+X) and download it again."
        return f"{row.name}: {problems}. {remedy}"
    without_hash = sum(file.status == "unknown" for file in result.files)
    compared = len(result.files) - without_hash
    texts = (
        (compared, f"{compared} files are correct"),
        (without_hash, f"{without_hash} files have no hash of a hub, so nothing vouches for their bytes"),
    )
    return f"{row.name}: {'; '.join(text for number, text in texts if number)}."


# Section: changes


async def _settings(browser: Browser, row: Row) -> None:
    """Edit the settings of one model."""
    name = row.name
    current = await browser.connection.call(lambda client: client.configure(name, {}))
    changes = await browser.ask(ModelSettingsScreen(name, current))
    if changes:
        await browser.connection.call(lambda client: client.configure(name, changes))
        browser.say(f"Saved. They apply when {name} is loaded next.")


async def _alias(browser: Browser, row: Row) -> None:
    """Set, rename or remove the alias of a model."""
    name = row.name
    old = row.aliases[0] if row.aliases else ""
    question = f"Alias of {name}" + ("; empty: remove it" if old else "")
    alias = await browser.ask(AskScreen(question, old, allows_empty=bool(old)))
    if alias is None or alias == old:
        return
    if alias:
        await browser.connection.call(lambda client: client.set_alias(alias, name))
    if old:
        await browser.connection.call(lambda client: client.set_alias(old, None))
    browser.say(f"{alias} is now a name of {name}." if alias else f"Removed the alias {old}.")
    browser.refresh_lists(row.key)


async def _delete(browser: Browser, row: Row) -> None:
    if row.downloads:
        await _change(browser, row, "cancel")
        return
    question = f"Delete {one_line(row.name, MAX_NAME)} and free {size(row.files.size if row.files else 0)}?"
    if row.aliases:
        question += f" This also removes: alias {one_line(', '.join(row.aliases), MAX_NAME)}."
    if await browser.ask(ConfirmScreen(question)):
        await browser.connection.delete(row.name)
        browser.say(f"Deleted {row.name}.")
        browser.refresh_lists()


async def _add_folder(browser: Browser, row: Row | None = None) -> None:
    """Add a model folder of this machine. The files stay in their folder."""
    typed = row.key if row is not None else await browser.ask(AskScreen("Folder of the model", "~/"))
    if typed is None:
        return
    folder = folder_path(typed)
    name = await browser.ask(AskScreen("Name in localllm: local/…", PurePath(folder).name))
    if name is None:
        return

    async def import_model(on_file: OnFile) -> Imported:
        return await browser.connection.call(lambda client: client.import_model(folder, name, on_progress=on_file))

    result = await _work(browser, WorkScreen(f"Adding {folder}", import_model))
    if result is not None:
        browser.say(f"Added {result.id}. Its files stay in {folder}.")
        browser.clear_filter()
        browser.refresh_lists(result.id)


async def _prune(browser: Browser) -> None:
    freed = await browser.ask(PruneScreen(browser.connection))
    if freed is not None:
        browser.say(f"Freed {size(freed)}.")
        browser.refresh_lists()


async def _install(browser: Browser) -> None:
    """Install llama.cpp. The models that need it can then be used at once."""
    if not any(entry.install for entry in browser.connection.entries):
        browser.say("No model here needs llama.cpp, or it is installed.")
        return
    question = "Install llama.cpp? It is compiled for this machine, which takes some minutes."
    if await browser.ask(ConfirmScreen(question)):
        is_installed = await browser.ask(InstallScreen(browser.connection))
        browser.say("llama.cpp is installed." if is_installed else "llama.cpp is not installed.")
        browser.refresh_lists()


async def _work(browser: Browser, dialog: WorkScreen[Result]) -> Result | None:
    """The result of a long operation; None if the user cancels. Raises AppError."""
    result = await browser.ask(dialog)
    if isinstance(result, AppError):
        raise result
    if result is None:
        browser.say("Cancelled.")
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
_GLOBAL_ACTIONS: dict[str, Callable[[Browser], Awaitable[None]]] = {
    "add_folder": _add_folder,
    "prune": _prune,
    "install": _install,
}
