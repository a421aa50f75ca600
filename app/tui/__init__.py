"""The terminal UI. The folders follow the screens: chat/ is the main screen, the other screens are beside it.

app           the application        chat/     header, messages, hints, prompt, status
connection    the daemon             history/  the history file and its screen
conversation  the tree of messages   models/   the list of models, its search, actions and dialogs
                                     adapters, settings, help, ask: one screen each
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import Settings

if TYPE_CHECKING:
    from ..client import LoadFlags


def run(
    settings: Settings,
    model: str,
    system: str | None = None,
    parameters: dict[str, Any] | None = None,
    *,
    load_flags: LoadFlags | None = None,
) -> int:
    """Run the UI until the user quits. Returns the exit code.

    `load_flags` belong to the models that the UI loads.

    `parameters` are sampling parameters by their OpenAI names. Raises InvalidRequest for an invalid one.
    """
    from .. import paths
    from ..client import Client, LoadFlags
    from .app import ChatApp
    from .conversation import Conversation
    from .history.store import Store
    from .parameters import check

    valid = {name: check(name, value) for name, value in (parameters or {}).items() if value is not None}
    app = ChatApp(
        settings,
        Conversation(model, system or "", valid),
        connect=Client.connect,
        load_flags=load_flags or LoadFlags(),
        store=Store(paths.history_file()),
    )
    return app.run() or 0
