"""`localllm chat`: the terminal UI, or line by line where there is no terminal."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from .. import config
from ..client import Client
from .asking import loaded, opening, parameters
from .run import stream, text_of


def chat(model: str | None, backend: str | None, quant: str | None, asked: dict[str, Any]) -> int:
    """A conversation with the model named, or the default one."""
    settings = config.load()
    model = model or settings.model
    if all(end.isatty() for end in (sys.stdin, sys.stdout, sys.stderr)):  # the UI draws on standard error
        from ..tui import run

        return run(settings, model, asked["system"], parameters(asked), backend=backend, quant=quant)
    _lines(loaded(settings, model, backend, quant), model, opening(asked["system"]), parameters(asked))
    return 0


def _lines(
    session: AbstractAsyncContextManager[Client], model: str, messages: list[dict[str, Any]], body: dict[str, Any]
) -> None:
    """Each line of standard input is a turn; empty lines are skipped, the end of input ends the chat."""
    # Input is read between the runs of the event loop: inside one, Ctrl-C would not interrupt the read.
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            client = runner.run(stack.enter_async_context(session))
            for number, line in enumerate(sys.stdin.buffer, start=1):
                turn = text_of(line, f"line {number} of standard input").strip()
                if turn:
                    messages.append({"role": "user", "content": turn})
                    answer = runner.run(stream(client, model, messages, body))
                    messages.append({"role": "assistant", "content": answer})
        finally:
            runner.run(stack.aclose())
