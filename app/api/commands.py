"""Runs work of the store in a child process of the daemon: a struct in, a struct out; see app/commands/child.py."""

from __future__ import annotations

import sys
from contextlib import suppress

import msgspec

from .. import children
from ..errors import WorkerDied
from ..frames import Fault
from .body import WireBody

COMMAND = (sys.executable, "-P", "-m", "localllm.app.commands.child")
SECONDS = 120.0  # maximum duration: a hub may be slow


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of the work as JSON, or its error."""

    result: bytes = b""
    fault: Fault | None = None


async def run(work: str, body: WireBody, seconds: float = 0.0) -> bytes:
    """The result of some work as JSON. `seconds`: maximum duration; 0: SECONDS.

    Raises the error of the work, or WorkerDied if the process crashes or takes longer.
    """
    seconds = seconds or SECONDS
    try:
        child = await children.run((*COMMAND, work), seconds, msgspec.msgpack.encode(body))
    except TimeoutError:
        raise WorkerDied(f"localllm {work} gave no result within {seconds:g} s") from None
    with suppress(msgspec.DecodeError):
        reply = msgspec.msgpack.decode(child.output, type=Reply)
        if reply.fault is not None:
            raise reply.fault.error()
        if reply.result:
            return reply.result
    raise WorkerDied(f"localllm {work} crashed", hint="run it in a terminal to see the reason")
