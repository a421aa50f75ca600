"""The child process that parses GGUF headers. It opens no file; the parent sends the beginning of the file."""

from __future__ import annotations

import msgspec

from ....engine.errors import ModelRefused
from ....engine.files.gguf import GgufHeader, parse_header
from ....engine.files.gguf_values import HeaderCut
from ...bounded import Exhausted, serve


class Job(msgspec.Struct, frozen=True):
    """The first bytes of a file. The arguments of engine.gguf.parse_header."""

    name: str
    head: bytes
    size: int


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The header, or the problem, or the minimum length of the head."""

    header: GgufHeader | None = None
    problem: str = ""
    hint: str = ""
    needed: int = 0


def answer(job: Job) -> Answer:
    try:
        return Answer(header=parse_header(job.name, job.head, job.size))
    except HeaderCut as cut:
        return Answer(needed=cut.needed)
    except ModelRefused as error:
        return Answer(problem=str(error), hint=error.hint)


def _handle(request: bytes) -> bytes:
    try:
        return msgspec.msgpack.encode(answer(msgspec.msgpack.decode(request, type=Job)))
    except MemoryError:
        problem = "its header exceeded the memory limit"
    raise Exhausted(msgspec.msgpack.encode(Answer(problem=problem)))


if __name__ == "__main__":
    serve(lambda _: None, _handle)
