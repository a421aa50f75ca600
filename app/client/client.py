"""The client of the daemon: loads models, and requests answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from .. import paths
from ..api.admin import AdapterEntry, LoadedModel, LoadFlags, LoadProgress, ModelEntry, Status
from ..config import Settings, loading
from ..daemon.owner import owner_pid
from ..errors import DaemonUnreachable, OtherOptions, PortTaken
from ..store.records import AdapterFolder
from ..version import VERSION
from .answers import Calls, ChatEvent, Done, Usage, adapter_selection, pieces, usage_of
from .store import StoreCalls
from .transport import full_name

NO_FLAGS = LoadFlags()
WAIT_SECONDS = 30.0  # maximum wait for a daemon that is starting or stopping
STOP_SECONDS = 30.0  # maximum wait for the end of the daemon, after the running answers
POLL_SECONDS = 0.05


class Client(StoreCalls):
    """A connection to the daemon over its unix socket: `async with await Client.connect(settings)`.

    Methods raise an AppError. An error of the daemon has the same class as in the daemon.
    """

    def __init__(self, settings: Settings, on_status: Callable[[str], None] = lambda _: None) -> None:
        """`on_status` gets messages for the user."""
        super().__init__()
        self._settings = settings
        self._say = on_status
        self._flags: dict[str, LoadFlags] = {}  # model → flags of the last exact load: answers need the same

    @classmethod
    async def connect(
        cls, settings: Settings, *, start: bool = True, on_status: Callable[[str], None] | None = None
    ) -> Client:
        """Connect to the daemon. With `start`, start a daemon if none runs. Raises DaemonUnreachable.

        If the daemon has another version, the call fails with `start`; without `start`, `on_status` gets a message.
        """
        say = on_status or (lambda _: None)
        if owner_pid() is None:
            if not start:
                raise DaemonUnreachable("no daemon is running", hint="localllm serve, chat or run starts one")
            say("starting the daemon")
            await _start(settings)
        client = cls(settings, say)
        try:
            status = await client._status()
        except BaseException:
            await client.close()
            raise
        if status.version != VERSION:
            message = f"the running daemon is localllm {status.version}, this program is {VERSION}"
            if start:
                await client.close()
                raise DaemonUnreachable(message, hint="run localllm stop; the next command starts the new version")
            say(message)
        if start and (others := _other_settings(settings, status.settings)):
            say(f"the running daemon has other settings ({others}); to apply yours, run localllm stop")
        if start and status.cache not in ("", paths.hub_cache_without_links()):
            say(f"the running daemon has another model cache ({status.cache}); to use yours, run localllm stop")
        return client

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def over(self) -> bool:
        """True if the daemon has stopped and this connection cannot be used any more."""
        return owner_pid() is None

    async def models(self) -> list[ModelEntry]:
        return msgspec.json.decode(await self._get("/admin/models"), type=list[ModelEntry])

    async def loaded(self) -> list[LoadedModel]:
        return msgspec.json.decode(await self._get("/admin/loaded"), type=list[LoadedModel])

    async def load(
        self,
        model: str,
        *,
        flags: LoadFlags = NO_FLAGS,
        exact: bool = False,
        for_chat: bool = False,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> LoadedModel:
        """Load a model, or return the loaded one. `on_progress` gets (stage, fraction from 0 to 1).

        `exact`: if the model is idle and was loaded with other flags or settings, load it again. All later answers of
        this client need the same flags: if another client loads the model with others, it is loaded again. `for_chat`:
        raise WrongKind for a model that does not chat.
        """
        body = {"model": full_name(model), **msgspec.structs.asdict(flags), "exact": exact, "for_chat": for_chat}
        async with aclosing(self._events("/admin/load", body)) as events:
            async for event in events:
                if "stage" not in event:
                    info = msgspec.convert(event, LoadedModel)
                    if exact:
                        self._remember(model, None if info.kept else flags, info)
                    return info
                progress = msgspec.convert(event, LoadProgress)
                if on_progress is not None:
                    on_progress(progress.stage, progress.done)
        raise DaemonUnreachable("the daemon stopped while it loaded the model")

    def _remember(self, model: str, flags: LoadFlags | None, info: LoadedModel) -> None:
        """Remember the flags of a load. None: answers use the model as it is loaded."""
        for name in {full_name(model), info.id}:
            if flags is None:
                self._flags.pop(name, None)
            else:
                self._flags[name] = flags

    def chat(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> AsyncGenerator[ChatEvent]:
        """Yield the events of one chat answer. Closing the iterator cancels the request.

        `parameters`: fields of OpenAI's API, and `adapter` as the text NAME or NAME=SCALE; empty: the base model.
        """
        return self._answer("/v1/chat/completions", {"model": full_name(model), "messages": messages, **parameters})

    def complete(self, model: str, prompt: str, **parameters: Any) -> AsyncGenerator[ChatEvent]:
        """Yield the events of one completion of a plain text, like `chat`."""
        return self._answer("/v1/completions", {"model": full_name(model), "prompt": prompt, **parameters})

    async def adapters(self) -> list[AdapterEntry]:
        return msgspec.json.decode(await self._get("/lora-adapters"), type=list[AdapterEntry])

    async def adapter_folders(self) -> list[AdapterFolder]:
        return msgspec.json.decode(await self._get("/admin/adapters"), type=list[AdapterFolder])

    async def load_adapter(self, name: str, path: str, **options: Any) -> None:
        """Load an adapter. `options`: the other fields of POST /v1/load_lora_adapter."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **options})

    async def unload_adapter(self, name: str, *, model: str | None = None) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name, "model": model})

    async def unload(self, model: str) -> None:
        await self._post("/admin/unload", {"model": full_name(model)})

    async def shutdown(self) -> None:
        """Stop the daemon after its running answers; returns when its process has ended."""
        await self._post("/admin/shutdown", {})
        deadline = time.monotonic() + self._settings.developer.drain + STOP_SECONDS
        while owner_pid() is not None:
            if time.monotonic() > deadline:
                raise DaemonUnreachable("the daemon did not stop in time")
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[ChatEvent]:
        start = time.perf_counter()
        finish = None
        warned: list[str] = []
        usage = Usage()
        decode = 0.0
        calls = Calls()
        async with aclosing(self._answer_events(path, _streamed(body))) as events:
            async for event in events:
                for warning in event.get("warnings", ()):
                    if warning not in warned:
                        self._say(warning)
                        warned.append(warning)
                if event.get("usage"):
                    usage = usage_of(event["usage"])
                    decode = event["usage"]["decode_seconds"]
                for choice in event["choices"]:
                    for piece in pieces(choice.get("delta") or {"content": choice.get("text")}, calls):
                        yield piece
                    finish = choice["finish_reason"] or finish
        for call in calls.rest():
            yield call
        if finish is None:
            raise DaemonUnreachable("the daemon stopped in the middle of the answer")
        seconds = time.perf_counter() - start
        yield Done(finish=finish, usage=usage, ttft=max(seconds - decode, 0.0), seconds=seconds)

    async def _answer_events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of an answer. If another client loaded the model with other flags, loads it again; if the model
        is busy, a message says so."""
        model = body["model"]
        flags = self._flags.get(model)
        if flags is not None:
            try:
                async with aclosing(self._events(path, _with_flags(body, flags))) as events:
                    async for event in events:
                        yield event
                return
            except OtherOptions:  # before the first event
                info = await self.load(model, flags=flags, exact=True)
            if info.kept:
                self._say(kept_notice(info))
            else:
                body = _with_flags(body, flags)
        async with aclosing(self._events(path, body)) as events:
            async for event in events:
                yield event

    async def _status(self) -> Status:
        """The daemon's status. Waits for a daemon that is starting or stopping."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return msgspec.json.decode(await self._get("/admin/status"), type=Status)
            except DaemonUnreachable:
                if owner_pid() is None or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(POLL_SECONDS)


def kept_notice(info: LoadedModel) -> str:
    """The notice about a load that had no effect, because the model answers requests of other clients."""
    options = " ".join(info.options) or "the settings of the daemon"
    return f"{info.id} is busy and stays loaded with {options}; this call has no effect on that"


def _streamed(body: dict[str, Any]) -> dict[str, Any]:
    """The body for an answer in events, with `adapter` as the field `lora` of the API."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    if "adapter" in body:
        adapter = body.pop("adapter")
        body["lora"] = [adapter_selection(adapter)] if adapter else []
    return body


def _with_flags(body: dict[str, Any], flags: LoadFlags) -> dict[str, Any]:
    return body | {"load": msgspec.structs.asdict(flags)}


def _other_settings(settings: Settings, daemon: dict[str, Any]) -> str:
    """The load settings for which the daemon has another value than this program sets, as text; empty if none."""
    defaults = loading(Settings())
    differences = []
    for name, value in loading(settings).items():
        is_set = value != defaults[name]
        if is_set and name in daemon and value != daemon[name]:
            differences.append(f"{name} is {daemon[name]}, not {value}")
    return ", ".join(differences)


async def _start(settings: Settings) -> None:
    from ..daemon import background

    try:
        await asyncio.to_thread(background.start, settings)
    except PortTaken:
        if owner_pid() is None:  # the program that uses the port is not a daemon
            raise
