"""The terminal UI. Its folders follow the screen: chat/ is what one sees first, the other screens lie beside it.

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
    """Run the UI until the person leaves; returns the exit code. `backend` and `quant` are for the models chosen here.

    `parameters` are sampling parameters by their OpenAI names; one that cannot be raises InvalidRequest.
    """
    from .. import paths
    from ..client import Client
    from .app import ChatApp
    from .conversation import Conversation
    from .history.store import Store
    from .parameters import check

    checked = {name: check(name, value) for name, value in (parameters or {}).items() if value is not None}
    app = ChatApp(
        settings,
        Conversation(model, system or "", checked),
        connect=Client.connect,
        backend=backend,
        quant=quant,
        store=Store(paths.history_file()),
    )
    return app.run() or 0
