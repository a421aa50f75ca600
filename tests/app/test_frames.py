"""Frames of a worker, in pieces of any size."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from localllm.app import frames
from localllm.app.frames import Finished, FromWorkerReader, Piece, Started

SENT = [Started(id="a", prompt_tokens=1), Piece(id="a", text="x" * 300), Piece(id="b"), Finished(id="a")]
BYTES = b"".join(map(frames.pack, SENT))


async def receive(reader: FromWorkerReader, found: list[frames.FromWorker]) -> None:
    """Add the frames to `found` until an error."""
    while True:
        for frame in await reader.read():
            found.append(frame)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 100, len(BYTES)])
async def test_frames_in_pieces_of_any_size(size: int) -> None:
    stream = asyncio.StreamReader()
    found: list[frames.FromWorker] = []
    receiving = asyncio.create_task(receive(FromWorkerReader(stream), found))
    for start in range(0, len(BYTES), size):
        stream.feed_data(BYTES[start : start + size])
        await asyncio.sleep(0)
    stream.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await receiving
    assert found == SENT


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (b"\0\0\0\0", ValueError),
        (b"\xff\xff\xff\xff", ValueError),
        (b"\0\0\0\1\xff", msgspec.DecodeError),
        (b"\0\0\0\2\x80", asyncio.IncompleteReadError),
        (b"\0", asyncio.IncompleteReadError),
    ],
)
async def test_frames_before_a_broken_one_arrive(end: bytes, error: type[Exception]) -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(BYTES + end)
    stream.feed_eof()
    found: list[frames.FromWorker] = []
    with pytest.raises(error):
        await receive(FromWorkerReader(stream), found)
    assert found == SENT
