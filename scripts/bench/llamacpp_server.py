"""The daemon beside llama-server, with the same GGUF file of random weights.

`python scripts/bench/llamacpp_server.py --tools FOLDER` needs llama-server in the folder, compiled from the source and
with the flags of the installed llama-cpp-python. Both servers get the same requests over HTTP, without streaming:

- tokens per second of CLIENTS clients that share a system prompt of PREFIX tokens, from the first request to the last
  answer; every pair has a new system prompt;
- the time of an answer of one token, with a system prompt that is cached and with a new one.

The servers alternate (A B B A); results are medians over the pairs. A server that is not measured is idle.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, get_args

import write_gguf
from rows import Row, parser, row, save
from shapes import SHAPES

from localllm.backends.machine import cores
from localllm.engine.options import CacheLayout

CLIENTS = 16
PREFIX = 1000  # characters of the system prompt; each is a token
QUESTION = 24
CONTEXT = 1152  # tokens of a sequence
SECONDS = 900  # maximum time of a load, and of a request


class Loading(Exception):
    """The server is loading the model."""


class Server:
    """An OpenAI-compatible server with the model."""

    def __init__(self, name: str, port: int, model: str) -> None:
        self.name = name
        self._port = port
        self._model = model

    def chat(self, system: str, question: str, tokens: int) -> int:
        """Wait for an answer. Returns the number of its tokens."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": self._model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        answer = self._request("POST", "/v1/chat/completions", body)
        count: int = answer["usage"]["completion_tokens"]
        return count

    def wait(self) -> None:
        """Wait until the server has loaded the model."""
        start = time.monotonic()
        while True:
            try:
                self.chat("a", "b", 1)
                return
            except (OSError, Loading):
                if time.monotonic() - start > SECONDS:
                    raise
                time.sleep(0.5)

    def _request(self, method: str, path: str, body: object) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status == 503:
            raise Loading
        if response.status != 200:
            raise RuntimeError(f"{self.name}: {response.status} {content[:300]!r}")
        return json.loads(content)


def text(random: Random, length: int) -> str:
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def throughput(server: Server, seed: int, tokens: int) -> float:
    """Tokens per second of all clients."""
    random = Random(seed)
    system = text(random, PREFIX)
    questions = [text(random, QUESTION) for _ in range(CLIENTS)]
    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        counts = list(pool.map(lambda question: server.chat(system, question, tokens), questions))
    return sum(counts) / (time.perf_counter() - start)


def first_tokens(server: Server, seed: int) -> tuple[float, float]:
    """Seconds of an answer of one token, without and with a prefix hit."""
    random = Random(seed)
    system = text(random, PREFIX)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        server.chat(system, text(random, QUESTION), 1)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


@contextmanager
def processes(options: argparse.Namespace, file: Path) -> Iterator[tuple[Server, Server]]:
    """(the daemon, llama-server), with the model loaded."""
    threads = options.threads or cores()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        layout = {"LOCALLLM_CACHE_LAYOUT": options.layout}
        folders = {"HOME": home, "LOCALLLM_RUNTIME_DIR": home, "HF_HOME": home / "hub"}
        environment = os.environ | {name: str(folder) for name, folder in folders.items()} | layout
        environment["HF_HUB_OFFLINE"] = "1"
        home.chmod(0o700)
        command = [sys.executable, "-m", "localllm.app.cli"]
        subprocess.run([*command, "import", str(file), "--name", "bench"], env=environment, check=True)
        context = ["--context", str(CONTEXT), "--threads", str(threads), "--max-rows", str(CLIENTS)]
        daemon = [*command, "serve", "--port", str(options.port), "--preload", "local/bench", *context]
        slots = ["-c", str(CLIENTS * CONTEXT), "-np", str(CLIENTS), "-t", str(threads), "-ngl", "0"]
        peer = [str(options.tools / "llama-server"), "-m", str(file), "--port", str(options.port + 1), *slots]
        for program in (daemon, [*peer, *options.peer.split()]):
            log = stack.enter_context((home / f"{Path(program[0]).name}.log").open("w"))
            process = subprocess.Popen(program, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        servers = Server("localllm", options.port, "local/bench"), Server("llama-server", options.port + 1, "bench")
        for server in servers:
            server.wait()
        yield servers


def measure(options: argparse.Namespace, file: Path) -> Iterator[Row]:
    title = f"llama.cpp, {SHAPES[options.shape].name}, {options.recipe}"
    if options.layout != "shared":
        title += f", cache_layout {options.layout}"
    facts = {"against": f"llama-server {options.peer}".strip(), "threads": options.threads or cores()}
    rates: dict[str, list[float]] = {"localllm": [], "llama-server": []}
    firsts: dict[str, list[tuple[float, float]]] = {"localllm": [], "llama-server": []}
    with processes(options, file) as servers:
        for server in servers:
            throughput(server, -1, 4)
        for number in range(options.pairs):
            for server in servers if number % 2 == 0 else reversed(servers):
                rates[server.name].append(throughput(server, number, options.tokens))
                firsts[server.name].append(first_tokens(server, 1000 + number))
    ratios = [ours / peer for ours, peer in zip(rates["localllm"], rates["llama-server"], strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    yield row(
        f"{title}, {CLIENTS} clients, a shared system prompt of {PREFIX} tokens, {options.tokens} tokens each",
        medians["localllm"],
        "tokens/s",
        peer=round(medians["llama-server"], 2),
        ratio=statistics.median(ratios),
        ratios=[round(ratio, 3) for ratio in ratios],
        **facts,
    )
    for name, times in firsts.items():
        new, hit = (statistics.median(values) for values in zip(*times, strict=True))
        factors = [round(first / second, 1) for first, second in times]
        yield row(
            f"{title}, answer of one token with {PREFIX} cached tokens, {name}",
            hit,
            "s",
            without_hit=round(new, 3),
            faster=statistics.median(factors),
            factors=factors,
            threads=facts["threads"],
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tools", type=Path, required=True, help="folder of llama.cpp's programs")
    arguments.add_argument("--peer", default="", help="more arguments of llama-server")
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    arguments.add_argument("--recipe", choices=write_gguf.RECIPES, default="q8_0")
    arguments.add_argument("--folder", default="build/bench", help="folder for the model")
    arguments.add_argument("--layout", choices=get_args(CacheLayout), default="shared", help="setting cache_layout")
    arguments.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--threads", type=int, help="default: physical cores")
    arguments.add_argument("--port", type=int, default=18_300, help="the first of two ports")
    arguments.add_argument("--save", default="llamacpp", help="which results to replace; empty: none")
    options = arguments.parse_args()
    file = Path(options.folder) / f"{options.shape}-{options.recipe}-text.gguf"
    write_gguf.write(SHAPES[options.shape], options.recipe, file, random_blocks=True, vocabulary=True)
    save(options.save, measure(options, file.resolve()), part=True)


if __name__ == "__main__":
    main()
