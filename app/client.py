"""The client of the daemon, used by the terminal UI and the commands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from ..engine.adapterbase import agree
from ..engine.quantization import Quant
from ..engine.ranges import RANGES, Range
from . import paths
from .api.admin import (
    AdapterEntry,
    AdapterFolder,
    Catalog,
    CatalogMatch,
    FileProgress,
    FileVerdict,
    HubMatch,
    Imported,
    LoadedModel,
    LoadFlags,
    LoadProgress,
    ModelEntry,
    ModelFacts,
    Pruning,
    SearchResult,
    Status,
    StoredFile,
    UnusedFiles,
    Verification,
)
from .config import Settings, loading
from .daemon.owner import owner_pid
from .errors import AppError, DaemonUnreachable, InvalidRequest, OtherOptions, PortTaken
from .frames import Fault, Machine
from .store.fitting import Fit
from .store.inspection import BackendVerdict, DtypeShare, Inspection, TemplateVerdict
from .store.jobs import Job
from .store.names import is_path
from .store.offers import Offer, fit_of, speed_of
from .version import VERSION

__all__ = [
    "NO_FLAGS",
    "RANGES",
    "AdapterEntry",
    "AdapterFolder",
    "BackendVerdict",
    "Catalog",
    "CatalogMatch",
    "ChatEvent",
    "Client",
    "Done",
    "DtypeShare",
    "FileProgress",
    "FileVerdict",
    "Fit",
    "HubMatch",
    "Imported",
    "Inspection",
    "Job",
    "LoadFlags",
    "LoadedModel",
    "Machine",
    "ModelEntry",
    "ModelFacts",
    "Offer",
    "Pruning",
    "Range",
    "ReasoningPiece",
    "SearchResult",
    "StoredFile",
    "TemplateVerdict",
    "TextPiece",
    "ToolCall",
    "UnusedFiles",
    "Usage",
    "Verification",
    "adapter_selection",
    "agree",
    "fit_of",
    "kept_notice",
    "speed_of",
]

NO_FLAGS = LoadFlags()
OnFile = Callable[[FileProgress], None]
Result = TypeVar("Result")
CONNECT_SECONDS = 5.0
WAIT_SECONDS = 30.0  # maximum wait for a daemon that is starting or stopping
STOP_SECONDS = 30.0  # maximum wait for the end of the daemon, in addition to the setting drain
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
    """A complete tool call."""

    id: str
    name: str
    arguments: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of an answer."""

    finish: str  # stop, length or tool_calls
    usage: Usage
    ttft: float  # seconds from the request to the first token: `seconds` minus the decode time of the daemon
    seconds: float  # seconds from the request to the end

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first one per second of decoding; 0 if there is no second token."""
        span = self.seconds - self.ttft
        return (self.usage.completion_tokens - 1) / span if span > 0 else 0.0


ChatEvent = TextPiece | ReasoningPiece | ToolCall | Done


class Client:
    """A connection to the daemon over its unix socket: `async with await Client.connect(settings)`.

    Methods raise an AppError. An error of the daemon has the same class as in the daemon.
    """

    def __init__(self, settings: Settings, on_status: Callable[[str], None] = lambda _: None) -> None:
        """`on_status` gets messages for the user."""
        self._settings = settings
        self._say = on_status
        self._flags: dict[str, LoadFlags] = {}  # model → flags of the last exact load: answers need the same
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
        return client

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

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
        on_progress: Callable[[str, float], None] | None = None,
    ) -> LoadedModel:
        """Load a model, or return the loaded one. `on_progress` gets (stage, fraction from 0 to 1).

        `exact`: if the model is idle and was loaded with other flags or settings, load it again. All later answers of
        this client need the same flags: if another client loads the model with others, it is loaded again.
        """
        body = {"model": _name(model), **msgspec.structs.asdict(flags), "exact": exact}
        async with aclosing(self._events("/admin/load", body)) as events:
            async for event in events:
                if "stage" not in event:
                    info = msgspec.convert(event, LoadedModel)
                    self._remember(model, flags if exact and not info.kept else None, info)
                    return info
                progress = msgspec.convert(event, LoadProgress)
                if on_progress is not None:
                    on_progress(progress.stage, progress.done)
        raise DaemonUnreachable("the daemon stopped while it loaded the model")

    def _remember(self, model: str, flags: LoadFlags | None, info: LoadedModel) -> None:
        """Remember the flags of a load. None: answers use the model as it is loaded."""
        for name in {_name(model), info.id}:
            if flags is None:
                self._flags.pop(name, None)
            else:
                self._flags[name] = flags

    def chat(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> AsyncGenerator[ChatEvent]:
        """Yield the events of one chat answer. Closing the iterator cancels the request.

        `parameters`: fields of OpenAI's API, and `adapter` as the text NAME or NAME=SCALE; empty: the base model.
        """
        return self._answer("/v1/chat/completions", {"model": _name(model), "messages": messages, **parameters})

    def complete(self, model: str, prompt: str, **parameters: Any) -> AsyncGenerator[ChatEvent]:
        """Yield the events of one completion of a plain text, like `chat`."""
        return self._answer("/v1/completions", {"model": _name(model), "prompt": prompt, **parameters})

    async def adapters(self) -> list[AdapterEntry]:
        return msgspec.json.decode(await self._get("/lora-adapters"), type=list[AdapterEntry])

    async def adapter_folders(self) -> list[AdapterFolder]:
        return msgspec.json.decode(await self._get("/admin/adapters"), type=list[AdapterFolder])

    async def load_adapter(self, name: str, path: str, **options: Any) -> None:
        """Load an adapter. `options`: the other fields of POST /v1/load_lora_adapter."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **options})

    async def unload_adapter(self, name: str, *, model: str | None = None) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name, "model": model})

    async def catalog(self) -> Catalog:
        """The device of this machine, and the models that can be downloaded."""
        return msgspec.json.decode(await self._get("/admin/catalog"), type=Catalog)

    async def downloads(self) -> list[Job]:
        return msgspec.json.decode(await self._get("/admin/downloads"), type=list[Job])

    async def download(self, name: str) -> Job:
        """Start a download in the daemon. It goes on when this client has ended."""
        return msgspec.json.decode(await self._post("/admin/downloads", {"name": name}), type=Job)

    async def change_download(self, name: str, action: str) -> Job:
        """`action`: pause, resume or cancel."""
        return msgspec.json.decode(await self._post(f"/admin/downloads/{action}", {"name": name}), type=Job)

    async def delete(self, model: str) -> None:
        """Unload a model and delete its files."""
        await self._post("/admin/delete", {"model": model})

    async def show(self, model: str) -> ModelFacts:
        """The facts about a model or an adapter on this machine."""
        return msgspec.json.decode(await self._post("/admin/show", {"model": _name(model)}), type=ModelFacts)

    async def inspect(self, model: str) -> Inspection:
        """The architecture, the size and the usable backends of a model, also before it is downloaded."""
        return msgspec.json.decode(await self._post("/admin/inspect", {"model": _name(model)}), type=Inspection)

    async def fit(
        self, model: str, *, context: int = 0, parallel: int = 1, quant: Quant | None = None, backend: str | None = None
    ) -> list[Fit]:
        """The memory of a model on each backend. `context`: 0 means the largest context that fits."""
        body = {"model": _name(model), "context": context, "parallel": parallel, "quant": quant, "backend": backend}
        return msgspec.json.decode(await self._post("/admin/fit", body), type=list[Fit])

    async def search(self, query: str, *, limit: int = 20, offline: bool = False) -> SearchResult:
        """The entries of the catalog and the repositories of the hub with these words."""
        body = {"query": query, "limit": limit, "offline": offline}
        return msgspec.json.decode(await self._post("/admin/search", body), type=SearchResult)

    async def verify(self, model: str, *, on_progress: OnFile | None = None) -> Verification:
        """Compare every file of a model with its hash. A cancelled call ends the work in the daemon."""
        return await self._work("/admin/verify", {"model": _name(model)}, Verification, on_progress)

    async def prune(self, *, dry_run: bool = True, everything: bool = False) -> Pruning:
        """List the files in the cache that no model uses; without `dry_run`, delete them."""
        body = {"dry_run": dry_run, "everything": everything}
        return msgspec.json.decode(await self._post("/admin/prune", body), type=Pruning)

    async def import_model(
        self, path: str, name: str = "", *, copy: bool = False, on_progress: OnFile | None = None
    ) -> Imported:
        """Add a model folder to the store. A cancelled call ends the work in the daemon."""
        body = {"path": _absolute(path), "name": name, "copy": copy}
        return await self._work("/admin/import", body, Imported, on_progress)

    async def aliases(self) -> dict[str, str]:
        """Alias -> name of a model."""
        return msgspec.json.decode(await self._get("/admin/aliases"), type=dict[str, str])

    async def set_alias(self, alias: str, name: str | None) -> dict[str, str]:
        """Add or replace an alias; None removes the alias. Returns all aliases."""
        body = {"alias": alias, "name": None if name is None else _name(name)}
        return msgspec.json.decode(await self._post("/admin/alias", body), type=dict[str, str])

    async def configure(self, model: str, changes: dict[str, str]) -> dict[str, Any]:
        """Change the settings of one model; an empty text removes a setting. Returns all settings of the model."""
        reply = await self._post("/admin/settings", {"model": _name(model), "changes": changes})
        return msgspec.json.decode(reply, type=dict[str, Any])

    async def unload(self, model: str) -> None:
        await self._post("/admin/unload", {"model": _name(model)})

    async def shutdown(self) -> None:
        """Stop the daemon after its running answers; returns when its process has ended."""
        await self._post("/admin/shutdown", {})
        deadline = time.monotonic() + self._settings.drain + STOP_SECONDS
        while owner_pid() is not None:
            if time.monotonic() > deadline:
                raise DaemonUnreachable("the daemon did not stop in time")
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[ChatEvent]:
        start = time.perf_counter()
        finish = None
        usage = Usage()
        decode = 0.0
        calls = _Calls()
        if "adapter" in body:
            adapter = body.pop("adapter")
            body["lora"] = [adapter_selection(adapter)] if adapter else []
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with aclosing(self._answer_events(path, body)) as events:
            async for event in events:
                if event.get("usage"):
                    usage = _usage(event["usage"])
                    decode = event["usage"]["decode_seconds"]
                for choice in event["choices"]:
                    for piece in _pieces(choice.get("delta") or {"content": choice.get("text")}, calls):
                        yield piece
                    finish = choice["finish_reason"] or finish
        for call in calls.rest():
            yield call
        if finish is None:
            raise DaemonUnreachable("the daemon stopped in the middle of the answer")
        seconds = time.perf_counter() - start
        yield Done(finish=finish, usage=usage, ttft=max(seconds - decode, 0.0), seconds=seconds)

    async def _answer_events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of an answer. The model has the flags of this client's load, or a message says that it has not."""
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

    async def _work(self, path: str, body: dict[str, Any], kind: type[Result], on_progress: OnFile | None) -> Result:
        """The last event of some work, after its events of progress."""
        async with aclosing(self._events(path, body)) as events:
            async for event in events:
                if "done" not in event:
                    return msgspec.convert(event, kind)
                if on_progress is not None:
                    on_progress(msgspec.convert(event, FileProgress))
        raise DaemonUnreachable("the daemon stopped before the end of the work")

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


def kept_notice(info: LoadedModel) -> str:
    """The notice about a load that had no effect, because the model answers requests of other clients."""
    options = " ".join(info.options) or "the settings of the daemon"
    return f"{info.id} is busy and stays loaded with {options}; this call has no effect on that"


def _with_flags(body: dict[str, Any], flags: LoadFlags) -> dict[str, Any]:
    return body | {"load": msgspec.structs.asdict(flags)}


def adapter_selection(text: str) -> dict[str, Any]:
    """The entry of `lora` for NAME or NAME=SCALE. Raises InvalidRequest."""
    name, _, number = text.partition("=")
    limits = RANGES["adapter_scale"]
    try:
        scale = float(number) if "=" in text else 1.0
    except ValueError:
        scale = float("nan")
    if not name or scale not in limits:
        raise InvalidRequest(
            f"{text[:200]!r} is not NAME or NAME=SCALE", hint=f"the scale is {limits}", param="adapter"
        )
    return {"name": name, "scale": scale}


async def _event_data(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event, without the end mark [DONE]."""
    unfinished = b""
    async for data in response.aiter_raw():
        *blocks, unfinished = (unfinished + data).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and block != b"data: [DONE]":
                yield block[6:]


def _other_settings(settings: Settings, daemon: dict[str, Any]) -> str:
    """The load settings for which the daemon has another value than this program sets, as text; empty if none."""
    defaults = loading(Settings())
    differences = []
    for name, value in loading(settings).items():
        is_set = value != defaults[name]
        if is_set and name in daemon and value != daemon[name]:
            differences.append(f"{name} is {daemon[name]}, not {value}")
    return ", ".join(differences)


class _Calls:
    """Joins streamed tool calls. A call is complete when the next one begins, or the answer ends."""

    def __init__(self) -> None:
        self._index = -1
        self._call = ToolCall(id="", name="", arguments="")

    def take(self, delta: dict[str, Any]) -> list[ToolCall]:
        complete = []
        if delta["index"] != self._index:
            complete = self.rest()
            self._index = delta["index"]
            self._call = ToolCall(id="", name="", arguments="")
        function = delta["function"]
        self._call = ToolCall(
            id=self._call.id + delta.get("id", ""),
            name=self._call.name + function.get("name", ""),
            arguments=self._call.arguments + function.get("arguments", ""),
        )
        return complete

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
        if owner_pid() is None:  # the program that uses the port is not a daemon
            raise


def _name(model: str) -> str:
    """The name of a model for the daemon: its id, or the absolute path of a folder."""
    return _absolute(model) if is_path(model) else model


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


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
