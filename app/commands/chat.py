"""`localllm chat`: the terminal UI, or one message per input line without a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from .. import config
from ..client import Client, LoadFlags
from .run import stream, text_of
from .session import loaded_client, parameters, system_messages


def chat(model: str | None, load: Mapping[str, Any], flags: dict[str, Any]) -> int:
    """Chat with `model`, or with the default model. `load`: the flags of the load by their names in LoadFlags."""
    load_flags = LoadFlags(**load)
    settings = config.load()
    model = model or settings.model
    if all(end.isatty() for end in (sys.stdin, sys.stdout, sys.stderr)):  # Textual writes to standard error
        from ..store.resolved import check_purpose
        from ..tui import run

        check_purpose(model, "chat")  # before the screen opens
        return run(settings, model, flags["system"], parameters(flags), load_flags=load_flags)
    _lines(
        loaded_client(settings, model, load_flags, for_chat=True),
        model,
        system_messages(flags["system"]),
        parameters(flags),
    )
    return 0


def _lines(
    session: AbstractAsyncContextManager[Client], model: str, messages: list[dict[str, Any]], body: dict[str, Any]
) -> None:
    """Answer each line of standard input, until the end of the input. Empty lines are skipped."""
    # Standard input is read outside of the event loop, because Ctrl-C would not interrupt a read in the event loop.
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            client = runner.run(stack.enter_async_context(session))
            for number, line in enumerate(sys.stdin.buffer, start=1):
                message = text_of(line, f"line {number} of standard input").strip()
                if message:
                    messages.append({"role": "user", "content": message})
                    answer = runner.run(stream(client.chat(model, messages, **body)))
                    messages.append({"role": "assistant", "content": answer})
        finally:
            runner.run(stack.aclose())
