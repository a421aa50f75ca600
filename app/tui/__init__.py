"""The terminal UI. The folders follow the screens: chat/ is the main screen, the other screens are beside it.

app           the application        chat/     header, messages, hints, prompt, status
connection    the daemon             history/  the history file and its screen
conversation  the tree of messages   models, settings, help, ask: one screen each
"""

from __future__ import annotations

from typing import Any

from ..config import Settings


def run(
    settings: Settings,
    model: str,
    system: str | None = None,
    parameters: dict[str, Any] | None = None,
    *,
    backend: str | None = None,
    quant: str | None = None,
) -> int:
    """Run the UI until the user quits. Returns the exit code.

    `backend` and `quant` apply to the models that the UI loads.

    `parameters` are sampling parameters by their OpenAI names. Raises InvalidRequest for an invalid one.
    """
    from .. import paths
    from ..client import Client
    from .app import ChatApp
    from .conversation import Conversation
    from .history.store import Store
    from .parameters import check

    valid = {name: check(name, value) for name, value in (parameters or {}).items() if value is not None}
    app = ChatApp(
        settings,
        Conversation(model, system or "", valid),
        connect=Client.connect,
        backend=backend,
        quant=quant,
        store=Store(paths.history_file()),
    )
    return app.run() or 0
