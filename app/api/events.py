"""A response of server-sent events: the progress of some work, then its result or its error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import AppError
from . import keep_alive
from .answers import error_event, event
from .exchange import SSE_HEADERS, unless_gone

log = logging.getLogger(__name__)

Report = Callable[[object], None]  # sends one event; call it on the event loop


class EventStream(Response):
    """Starts the work when the response begins. If the client disconnects, the work is cancelled."""

    def __init__(self, work: Callable[[Report], Awaitable[object]]) -> None:
        super().__init__(media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async for data in self.events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the bytes of each event. While the work reports nothing, yield comments that keep the connection."""
        reports: asyncio.Queue[bytes] = asyncio.Queue()
        work = asyncio.ensure_future(self._work(lambda report: reports.put_nowait(event(report))))
        work.add_done_callback(lambda _: reports.put_nowait(b""))
        try:
            while data := await _next(reports):
                yield data
            yield event(work.result())
        except AppError as error:
            yield error_event(error)
        except Exception:  # the status of the response is already sent
            log.exception("internal error in the work of an event stream")
            yield error_event(AppError("internal error in the daemon; see its log"))
        finally:
            work.cancel()


async def _next(reports: asyncio.Queue[bytes]) -> bytes:
    try:
        async with keep_alive.Deadline().timeout():
            return await reports.get()
    except TimeoutError:
        return keep_alive.COMMENT
