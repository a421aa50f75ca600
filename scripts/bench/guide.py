"""The built-in model on this machine's CPU, through the daemon as any client, beside transformers in eager mode.

`python scripts/bench/guide.py [PAIRS]`: greedy, one answer of 64 tokens at a time, the two in turns (A B B A); figures
are medians over the pairs, in tokens per second after the first token for both.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import transformers
from rows import Row, row, save

from localllm.app import config, paths
from localllm.app.client import Client, Done
from localllm.backends.cpu.device import device_for
from localllm.backends.cpu.machine import cpu_flags
from localllm.engine.modelfiles import read_model

NEW = 64
TARGET = 5.0  # ratio
PAUSE = 0.2  # seconds: until threads of the one before that still spin for work have gone to sleep
QUESTION = [{"role": "user", "content": "How do I use localllm from Python with the openai package?"}]


class Peer:
    """transformers' own loop, on all physical cores, in the number format that ours uses."""

    def __init__(self) -> None:
        folder = paths.guide_dir()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        dtype = device_for(read_model(folder), cpu_flags()).dtype
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.inputs = self.tokenizer.apply_chat_template(
            QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    def seconds(self, tokens: int) -> float:
        start = time.perf_counter()
        self.model.generate(**self.inputs, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False)
        return time.perf_counter() - start

    def rate(self) -> float:
        return (NEW - 1) / (self.seconds(NEW) - self.seconds(1))


async def our_rate(client: Client) -> float:
    asked = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    async with aclosing(client.chat("guide", QUESTION, **asked)) as answer:
        async for event in answer:
            if isinstance(event, Done):
                return event.tokens_per_second
    raise AssertionError("an answer ends with Done")


@asynccontextmanager
async def own_daemon() -> AsyncIterator[Client]:
    """A daemon for this measurement only, so that a person's own is left alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCALLLM_RUNTIME_DIR"] = folder
        async with await Client.connect(config.load({"port": 0})) as client:
            await client.load("guide")
            yield client
            await client.shutdown()


async def measure(pairs: int) -> list[Row]:
    peer = Peer()
    ours: list[float] = []
    theirs: list[float] = []
    async with own_daemon() as client:
        await our_rate(client)
        peer.rate()
        for pair in range(pairs):
            for first in (True, False) if pair % 2 == 0 else (False, True):
                await asyncio.sleep(PAUSE)
                if first:
                    ours.append(await our_rate(client))
                else:
                    theirs.append(peer.rate())
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    name = f"guide, decode at one row, against transformers {transformers.__version__} eager"
    decode, peer_decode = statistics.median(ours), round(statistics.median(theirs), 2)
    return [row(name, decode, "tokens/s", peer=peer_decode, ratio=ratio, target=TARGET, pairs=pairs)]


def rows(pairs: int) -> Iterator[Row]:
    yield from asyncio.run(measure(pairs))


if __name__ == "__main__":
    save("guide", rows(int(sys.argv[1]) if len(sys.argv) > 1 else 6))
