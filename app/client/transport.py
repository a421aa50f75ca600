"""Requests to the daemon over its unix socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from .. import paths
from ..errors import AppError, DaemonUnreachable
from ..frames import Fault
from ..store.names import check_path, is_path

CONNECT_SECONDS = 5.0


class Transport:
    """A connection to the daemon. An error of the daemon has the same class as in the daemon."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(paths.socket_file())),
            base_url="http://localhost",
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str) -> bytes:
        return await self._request("GET", path, b"")

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._request("POST", path, msgspec.json.encode(body))

    async def _request(self, method: str, path: str, content: bytes) -> bytes:
        headers = {"content-type": "application/json"} if content else {}
        try:
            response = await self._http.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise _lost(error) from None
        if response.status_code >= 400:
            raise _error(response.content)
        return response.content

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the JSON of each server-sent event. Raises the error of the response or of an event."""
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream("POST", path, content=msgspec.json.encode(body), headers=headers) as response:
                if response.status_code >= 400:
                    raise _error(await response.aread())
                async for data in _event_data(response):
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        raise _error(data)
                    yield event
        except httpx.HTTPError as error:
            raise _lost(error) from None


async def _event_data(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event, without the end mark [DONE]."""
    unfinished = b""
    async for data in response.aiter_raw():
        *blocks, unfinished = (unfinished + data).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and block != b"data: [DONE]":
                yield block[6:]


def full_name(model: str) -> str:
    """The name of a model for the daemon: its id, or the absolute path of a folder."""
    return absolute(model) if is_path(model) else model


def absolute(path: str) -> str:
    """Raises InvalidRequest for a path that is no text, which no request can have."""
    full_path = Path(path).expanduser().absolute()
    check_path(full_path)
    return str(full_path)


def _lost(error: httpx.HTTPError) -> AppError:
    return DaemonUnreachable(f"cannot reach the daemon: {error}" if str(error) else "the daemon stopped")


def _error(body: bytes) -> AppError:
    """The error of a response body; it has the same class as in the daemon."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return DaemonUnreachable("the daemon sent a response that this version does not understand")
    return Fault(
        code=error["code"],
        message=error["message"],
        hint=error.get("hint", ""),
        param=error["param"],
        numbers={name: value for name, value in error.items() if isinstance(value, int)},
    ).error()
