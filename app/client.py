"""How the terminal UI and the commands speak to the daemon. Nothing else of ours does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec

from . import paths
from .config import Settings, loading
from .daemon.admin import LoadedModel, LoadProgress, ModelEntry, Status
from .daemon.frames import Fault
from .daemon.owner import owner_pid
from .errors import AppError, DaemonUnreachable, PortTaken
from .store.catalog import is_path
from .version import VERSION

__all__ = [
    "ChatEvent",
    "Client",
    "Done",
    "LoadedModel",
    "ModelEntry",
    "ReasoningPiece",
    "TextPiece",
    "ToolCall",
    "Usage",
]

CONNECT_SECONDS = 5.0
WAIT_SECONDS = 30.0  # for a daemon that another process is starting
STOP_SECONDS = 30.0  # beyond the drain
POLL_SECONDS = 0.05


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class TextPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole call, given once its arguments are complete."""

    id: str
    name: str
    arguments: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of an answer."""

    finish: str  # stop, length, tool_calls
    usage: Usage
    ttft: float  # seconds from asking to the first piece; what follows it is timed by the daemon, which is not busy
    seconds: float  # from asking to the end

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first over the time after the first; 0 when they came in one piece."""
        span = self.seconds - self.ttft
        return (self.usage.completion_tokens - 1) / span if span > 0 else 0.0


ChatEvent = TextPiece | ReasoningPiece | ToolCall | Done


class Client:
    """A connection to the daemon over its unix socket. Use `async with await Client.connect(settings)`.

    Every method raises an AppError of app/errors.py; the daemon's own come back as the same class.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(paths.socket_file())),
            base_url="http://localhost",
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    @classmethod
    async def connect(
        cls, settings: Settings, *, start: bool = True, on_status: Callable[[str], None] | None = None
    ) -> Client:
        """Reach the daemon, starting it when `start` and none runs. Raises DaemonUnreachable.

        With `start`, a daemon of another version is refused as well; without, it is only told to `on_status`.
        """
        say = on_status or (lambda _: None)
        if owner_pid() is None:
            if not start:
                raise DaemonUnreachable("no daemon runs", hint="localllm serve, chat or run starts one")
            say("starting the daemon")
            await _start(settings)
        client = cls(settings)
        try:
            status = await client._status()
        except BaseException:
            await client.close()
            raise
        if status.version != VERSION:
            words = f"the running daemon is localllm {status.version}, but this is {VERSION}"
            if start:
                await client.close()
                raise DaemonUnreachable(words, hint="localllm stop ends it; the next command starts the new one")
            say(words)
        if start and (others := _other_settings(settings, status.settings)):
            say(
                f"the running daemon has other settings ({others}); after localllm stop the next command starts it anew"
            )
        return client

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def over(self) -> bool:
        """No daemon runs any more: connect anew."""
        return owner_pid() is None

    async def models(self) -> list[ModelEntry]:
        return msgspec.json.decode(await self._get("/admin/models"), type=list[ModelEntry])

    async def loaded(self) -> list[LoadedModel]:
        return msgspec.json.decode(await self._get("/admin/loaded"), type=list[LoadedModel])

    async def load(
        self,
        model: str,
        *,
        backend: str | None = None,
        quant: str | None = None,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> LoadedModel:
        """Load a model (a no-op when it is); progress comes as (words, 0…1)."""
        body = {"model": _name(model), "backend": backend, "quant": quant}
        async with aclosing(self._events("/admin/load", body)) as events:
            async for event in events:
                if "stage" not in event:
                    return msgspec.convert(event, LoadedModel)
                progress = msgspec.convert(event, LoadProgress)
                if on_progress is not None:
                    on_progress(progress.stage, progress.done)
        raise DaemonUnreachable("the daemon ended while the model was loading")

    def chat(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> AsyncGenerator[ChatEvent]:
        """One answer as events; parameters are the OpenAI body's. Closing the iterator cancels the request."""
        return self._answer("/v1/chat/completions", {"model": _name(model), "messages": messages, **parameters})

    def complete(self, model: str, prompt: str, **parameters: Any) -> AsyncGenerator[ChatEvent]:
        """The same for a plain text to be continued."""
        return self._answer("/v1/completions", {"model": _name(model), "prompt": prompt, **parameters})

    async def unload(self, model: str) -> None:
        await self._post("/admin/unload", {"model": _name(model)})

    async def shutdown(self) -> None:
        """Ask the daemon to drain and end; returns when it is gone."""
        await self._post("/admin/shutdown", {})
        deadline = time.monotonic() + self._settings.drain + STOP_SECONDS
        while owner_pid() is not None:
            if time.monotonic() > deadline:
                raise DaemonUnreachable("the daemon was asked to stop, but still runs")
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[ChatEvent]:
        asked = time.perf_counter()
        finish = None
        usage, decode = Usage(), 0.0
        calls = _Calls()
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with aclosing(self._events(path, body)) as events:
            async for event in events:
                if event.get("usage"):
                    usage, decode = _usage(event["usage"]), event["usage"]["decode_seconds"]
                for choice in event["choices"]:
                    for piece in _pieces(choice.get("delta") or {"content": choice.get("text")}, calls):
                        yield piece
                    finish = choice["finish_reason"] or finish
        for call in calls.rest():
            yield call
        if finish is None:
            raise DaemonUnreachable("the daemon ended in the middle of the answer")
        seconds = time.perf_counter() - asked
        yield Done(finish=finish, usage=usage, ttft=max(seconds - decode, 0.0), seconds=seconds)

    async def _status(self) -> Status:
        """Waits for a daemon that is just starting, or just ending."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return msgspec.json.decode(await self._get("/admin/status"), type=Status)
            except DaemonUnreachable:
                if owner_pid() is None or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(POLL_SECONDS)

    async def _get(self, path: str) -> bytes:
        return await self._whole("GET", path, b"")

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._whole("POST", path, msgspec.json.encode(body))

    async def _whole(self, method: str, path: str, content: bytes) -> bytes:
        headers = {"content-type": "application/json"} if content else {}
        try:
            response = await self._http.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise _lost(error) from None
        if response.status_code >= 400:
            raise _error(response.content)
        return response.content

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The JSON of each server-sent event. Raises the error that came instead, or in between."""
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream("POST", path, content=msgspec.json.encode(body), headers=headers) as response:
                if response.status_code >= 400:
                    raise _error(await response.aread())
                rest = b""
                async for data in response.aiter_raw():
                    *blocks, rest = (rest + data).split(b"\n\n")
                    for block in blocks:
                        if block == b"data: [DONE]" or not block.startswith(b"data: "):
                            continue
                        event = msgspec.json.decode(block[6:])
                        if "error" in event:
                            raise _error(block[6:])
                        yield event
        except httpx.HTTPError as error:
            raise _lost(error) from None


def _other_settings(ours: Settings, theirs: dict[str, Any]) -> str:
    """Settings that are set here, and that the daemon loads models without; empty without any."""
    defaults = loading(Settings())
    here = {name: value for name, value in loading(ours).items() if value != defaults[name] and name in theirs}
    return ", ".join(f"{name} is {theirs[name]}, not {value}" for name, value in here.items() if value != theirs[name])


class _Calls:
    """Joins streamed tool calls: a call is whole once the next one begins, or the answer ends."""

    def __init__(self) -> None:
        self._index = -1
        self._call = ToolCall(id="", name="", arguments="")

    def take(self, delta: dict[str, Any]) -> list[ToolCall]:
        whole = []
        if delta["index"] != self._index:
            whole, self._index = self.rest(), delta["index"]
            self._call = ToolCall(id="", name="", arguments="")
        function = delta["function"]
        self._call = ToolCall(
            id=self._call.id + delta.get("id", ""),
            name=self._call.name + function.get("name", ""),
            arguments=self._call.arguments + function.get("arguments", ""),
        )
        return whole

    def rest(self) -> list[ToolCall]:
        return [] if self._index < 0 else [self._call]


def _pieces(delta: dict[str, Any], calls: _Calls) -> list[TextPiece | ReasoningPiece | ToolCall]:
    pieces: list[TextPiece | ReasoningPiece | ToolCall] = []
    if delta.get("reasoning"):
        pieces.append(ReasoningPiece(delta["reasoning"]))
    if delta.get("content"):
        pieces.append(TextPiece(delta["content"]))
    for call in delta.get("tool_calls", ()):
        pieces += calls.take(call)
    return pieces


def _usage(report: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=report["prompt_tokens"],
        completion_tokens=report["completion_tokens"],
        cached_tokens=report["prompt_tokens_details"]["cached_tokens"],
    )


async def _start(settings: Settings) -> None:
    from .daemon import background

    try:
        await asyncio.to_thread(background.start, settings)
    except PortTaken:
        if owner_pid() is None:  # not another client's daemon, but a stranger at our port
            raise


def _name(model: str) -> str:
    """Ids go as they are; a path is made absolute, as the daemon stands in another folder."""
    return str(Path(model).expanduser().absolute()) if is_path(model) else model


def _lost(error: httpx.HTTPError) -> AppError:
    return DaemonUnreachable(f"the daemon cannot be reached: {error}" if str(error) else "the daemon ended")


def _error(body: bytes) -> AppError:
    """The daemon's error as it was raised there."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return DaemonUnreachable("the daemon gave an answer this version does not understand")
    return Fault(
        code=error["code"],
        message=error["message"],
        hint=error.get("hint", ""),
        param=error["param"],
        numbers={name: value for name, value in error.items() if isinstance(value, int)},
    ).error()
