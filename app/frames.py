"""The messages between daemon and worker: msgpack frames with a fixed schema.

A frame is 4 bytes of big-endian length and one tagged struct. Frames are never unpickled. Every frame about a
request has the id of the request. A request ends with exactly one Finished or Failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..engine.options import LoadOptions
from .errors import BY_CODE, AppError
from .purpose import Purpose

MAX_FRAME = 64 * 2**20
READ_BYTES = 2**18  # maximum size of one read


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all frames."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An AppError in a form that can be sent to another process."""

    code: str
    message: str
    hint: str = ""
    param: str | None = None
    numbers: dict[str, int] = {}

    @classmethod
    def of(cls, error: AppError) -> Fault:
        return cls(
            code=error.code, message=error.message, hint=error.hint, param=error.param, numbers=dict(error.numbers)
        )

    def error(self) -> AppError:
        kind = BY_CODE.get(self.code, AppError)
        return kind(self.message, hint=self.hint, param=self.param, **self.numbers)


# Frames from the daemon to a worker.


class Load(Frame):
    """Load a model: the first frame to a worker. The replies are any number of Loading, then Loaded or LoadFailed."""

    model: str  # the id that clients use
    path: str
    backend: str = "auto"
    options: LoadOptions = LoadOptions()
    shared: tuple[str, ...] = ()  # settings of all models: without those that the backend refuses, the model is loaded


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Structured output: the constraint on the text of the answer."""

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    schema: dict[str, Any] | None = None
    strict: bool = False  # refuse parts of the schema that cannot be enforced exactly
    regex: str | None = None
    choices: list[str] | None = None


# How much the model may reason before its answer. `on`: as much as it wants.
Reasoning = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "on"]


class Generate(Frame):
    """A request for `n` answers to messages or to a prompt.

    The replies are Started, any number of Piece, then Finished or Failed.
    """

    id: str
    messages: list[dict[str, Any]] | None = None  # validated by the API; `content` is a text
    prompt: str | list[int] | None = None
    suffix: str | None = None  # the answer is the text between `prompt` and `suffix`
    tools: list[dict[str, Any]] = []  # for the prompt; validated by the API
    forced_tools: list[dict[str, Any]] = []  # the answer must call one of these tools; empty: it may be text
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, Any] = {}
    reasoning: Reasoning | None = None
    verbosity: str | None = None
    continue_final_message: bool = False
    n: int = 1
    max_tokens: int | None = None  # None: until the context is full; 0: only the echo, with its log-probabilities
    min_tokens: int = 0  # tokens before the first token that may end the answer
    fit_max_tokens: bool = False  # a limit beyond the context is no error: the answer ends where the context is full
    temperature: float | None = None  # None: value of the model's generation_config.json, or 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}  # token id → bias
    seed: int | None = None  # None: random; choice i uses seed + i
    stop: list[str] = []
    stop_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    response_format: ResponseFormat | None = None
    echo: bool = False  # with `logprobs`, the model computes those of the prompt, token by token
    adapter: str | None = None  # name of an adapter; empty: the base model; None: the default of the model
    adapter_scale: float = 1.0  # factor of the adapter's change of the weights


class Embed(Frame):
    """A request for the vector of a text. The replies are Started, Embedded, then Finished or Failed."""

    id: str
    input: str | list[int]
    dimensions: int | None = None  # numbers in the vector; None: those of the model
    truncate: bool = False  # cut a text that is longer than the context; False: refuse it
    adapter: str | None = None  # as in Generate
    adapter_scale: float = 1.0


class Cancel(Frame):
    """Cancel a request. The reply is Finished, or Failed if the request had already failed."""

    id: str


class Tokenize(Frame):
    """A request for the tokens of a text, of messages, or of the prompt of `request`."""

    id: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    request: Generate | None = None
    add_special_tokens: bool = True


class Detokenize(Frame):
    id: str
    tokens: list[int]


class LoadAdapter(Frame):
    """Read and register an adapter. It replaces an adapter of the same name. The reply is AdapterLoaded or Failed."""

    id: str
    name: str
    path: str
    pinned: bool = False  # the adapter keeps its slot on the device
    version: str = ""  # required hash of the adapter's files; empty: any


class UnloadAdapter(Frame):
    """Unregister an adapter for new requests; running requests go on. The reply is AdapterUnloaded or Failed."""

    id: str
    name: str


class AskStats(Frame):
    id: str


class Shutdown(Frame):
    """Stop at once, without finishing requests, and exit with status 0."""


# Frames from a worker to the daemon.


class Loading(Frame):
    stage: str  # name of the stage, shown to the user
    done: float = 0.0  # completed fraction of the load, 0 to 1
    more: float = 0.0  # seconds that this stage may take in addition to the limit of every stage


class ModelInfo(Frame):
    model: str
    backend: str
    device: str
    dtype: str
    context: int
    vocab: int
    weight_bytes: int
    cache_bytes: int
    cache_tokens: int
    quant: str = ""  # format of quantised weights; empty: not quantised
    token_bytes: int = 0  # bytes of weights read to decode one token; 0: unknown
    reason: str = ""  # why this backend was chosen; for the log
    purpose: Purpose = "chat"
    embedding_size: int = 0  # numbers in a vector of POST /v1/embeddings; 0: the model computes no embeddings
    step_seconds: float = 0.0  # seconds after which a step counts as hung; 0: no limit
    unapplied: tuple[str, ...] = ()  # names of settings of all models that this model does not have
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built
    sampling: dict[str, float] = {}  # default of each sampling parameter that has one


class Loaded(Frame):
    info: ModelInfo


class LoadFailed(Frame):
    fault: Fault


class Started(Frame):
    """The request is valid and runs. An error after this frame ends an answer that has begun."""

    id: str
    prompt_tokens: int
    warnings: tuple[str, ...] = ()  # for the user, e.g. that the prompt has a special token twice
    ignored: tuple[str, ...] = ()  # fields of Generate, and template variables, without a switch in the chat template


class PieceLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    id: int
    bytes: list[int]
    logprob: float  # not a number: the first token of a prompt has none
    top: list[PieceLogprob] = []


class ToolCallPiece(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New text of a tool call. The arguments of all pieces make its JSON."""

    index: int
    id: str = ""  # in the first piece of a call only
    name: str = ""  # in the first piece of a call only
    arguments: str = ""


class Piece(Frame):
    """New output of one choice."""

    id: str
    choice: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = []
    tokens: int = 0  # number of tokens whose text is in this piece
    logprobs: list[PieceLogprob] = []
    finish: Literal["stop", "length", "tool_calls"] | None = None
    stop: str = ""  # the stop string that ended the answer


class Embedded(Frame):
    id: str
    vector: bytes  # [size] float32, little endian


class Finished(Frame):
    id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cancelled: bool = False


class Failed(Frame):
    id: str
    fault: Fault


class Tokens(Frame):
    id: str
    tokens: list[int]
    pieces: list[str] = []


class Text(Frame):
    id: str
    text: str


class AdapterLoaded(Frame):
    id: str
    version: str  # hash of the adapter's files
    rank: int
    base: str = ""  # name or path of the base model in the adapter's files
    warning: str = ""  # shown to the user, e.g. that the adapter names another base model


class AdapterUnloaded(Frame):
    id: str


class Stats(Frame):
    id: str
    running: int
    waiting: int
    cache_tokens: int
    cache_used: int
    steps: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    late_compiles: int = 0
    step_host_seconds: float = 0.0
    step_seconds: float = 0.0
    step_age: float = 0.0


ToWorker = Load | Generate | Embed | Cancel | Tokenize | Detokenize | LoadAdapter | UnloadAdapter | AskStats | Shutdown
OfRequest = (  # frames with the id of a request
    Started | Piece | Embedded | Finished | Failed | Tokens | Text | AdapterLoaded | AdapterUnloaded | Stats
)
FromWorker = Loading | Loaded | LoadFailed | OfRequest


def _encoded(value: Any) -> str:
    """The text of a Path, because msgspec does not encode the type Path."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"a frame cannot carry a {type(value).__name__}")


def _decoded(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"a frame cannot carry a {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker, dec_hook=_decoded)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def pack(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME}")
    return await reader.readexactly(length)


async def read_to_worker(reader: asyncio.StreamReader) -> ToWorker:
    """The next frame for a worker. Raises asyncio.IncompleteReadError if the daemon has ended."""
    return _to_worker.decode(await _read_body(reader))


class FromWorkerReader:
    """Reads the frames of a worker, several at a time: each wait for a frame of its own would cost more than the
    frame."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._buffer = bytearray()

    async def read(self) -> Iterator[FromWorker]:
        """At least one frame. Raises asyncio.IncompleteReadError if the worker has ended.

        The iterator raises ValueError for a frame of a wrong size, msgspec.DecodeError for bytes that are no frame.
        """
        while len(self._buffer) < self._end(0):
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise asyncio.IncompleteReadError(bytes(self._buffer), None)
            self._buffer += data
        return self._complete()

    def _end(self, start: int) -> int:
        """The end of the frame that begins at `start`; without its length, that of the length. Raises ValueError."""
        if len(self._buffer) < start + 4:
            return start + 4
        length = int.from_bytes(self._buffer[start : start + 4], "big")
        if not 0 < length <= MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes is outside the limits: 1 to {MAX_FRAME}")
        return start + 4 + length

    def _complete(self) -> Iterator[FromWorker]:
        """The complete frames of the buffer, which are removed from it."""
        start = 0
        try:
            while (end := self._end(start)) <= len(self._buffer) and end > start + 4:
                yield _from_worker.decode(self._buffer[start + 4 : end])
                start = end
        finally:
            del self._buffer[:start]


async def read_from_worker(reader: asyncio.StreamReader) -> FromWorker:
    """The next frame from a worker. Raises asyncio.IncompleteReadError if the worker has ended."""
    return _from_worker.decode(await _read_body(reader))


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The device on which models run. Empty fields and 0: unknown, or no backend works."""

    backend: str = ""
    device: str = ""
    memory: int = 0  # bytes
    free: int = 0  # bytes that were free at the probe
    bandwidth: float = 0.0  # read bandwidth of the memory in bytes per second
