"""The built-in model on the CPU of this machine, through the daemon, beside transformers in eager mode.

`python scripts/bench/guide.py [PAIRS]`: greedy answers of 64 tokens, one at a time. The two programs alternate
(A B B A). Results are medians over the pairs in tokens per second after the first token.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import transformers
from rows import Row, parser, row, save

from localllm.app import config, paths
from localllm.app.client import Client, Done
from localllm.backends.cpu.device import device_for
from localllm.backends.machine import cpu_flags
from localllm.engine.files.model_files import read_model

NEW = 64
TARGET = 5.0  # ratio
PAUSE = 0.2  # seconds before a measurement: idle threads of the other program may spin until then
QUESTION = [{"role": "user", "content": "How do I use localllm from Python with the openai package?"}]


class Transformers:
    """The loop of transformers, on all physical cores, in the dtype that localllm uses."""

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


async def localllm_rate(client: Client) -> float:
    options = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    async with aclosing(client.chat("guide", QUESTION, **options)) as answer:
        async for event in answer:
            if isinstance(event, Done):
                return event.tokens_per_second
    raise AssertionError("the answer has no end")


@asynccontextmanager
async def daemon() -> AsyncIterator[Client]:
    """A daemon for this measurement only, separate from the daemon of the user."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCALLLM_RUNTIME_DIR"] = folder
        async with await Client.connect(config.load({"port": 0})) as client:
            await client.load("guide")
            yield client
            await client.shutdown()


async def measure(pairs: int) -> list[Row]:
    peer = Transformers()
    rates: list[float] = []
    peer_rates: list[float] = []
    async with daemon() as client:
        await localllm_rate(client)
        peer.rate()
        for pair in range(pairs):
            for is_peer in (False, True) if pair % 2 == 0 else (True, False):
                await asyncio.sleep(PAUSE)
                if is_peer:
                    peer_rates.append(peer.rate())
                else:
                    rates.append(await localllm_rate(client))
    ratio = statistics.median(rate / peer_rate for rate, peer_rate in zip(rates, peer_rates, strict=True))
    name = f"guide, decode at one row, against transformers {transformers.__version__} eager"
    decode = statistics.median(rates)
    peer_decode = round(statistics.median(peer_rates), 2)
    return [row(name, decode, "tokens/s", peer=peer_decode, ratio=ratio, target=TARGET, pairs=pairs)]


def rows(pairs: int) -> Iterator[Row]:
    yield from asyncio.run(measure(pairs))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("pairs", type=int, nargs="?", default=6)
    save("guide", rows(arguments.parse_args().pairs))
