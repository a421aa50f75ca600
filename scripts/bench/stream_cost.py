"""Measures the processor time of the daemon per streamed token: `scripts/bench/stream_cost.py [STREAMS] [TOKENS]`.

A worker without a model writes one token to each stream in every step. The result is the time of the daemon's process
alone, divided by the number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 0.1  # enough for the daemon to send the tokens of one step before the next one

WORKER = f"""
import asyncio, socket, sys
sys.path.insert(0, {str(ROOT)!r})
from localllm.app import frames
from localllm.app.frames import Finished, Generate, Piece, Started

async def main():
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[2])))
    running = {{}}
    async def steps():
        while True:
            await asyncio.sleep({STEP_SECONDS})
            output = []
            for name, left in list(running.items()):
                running[name] = left - 1
                output.append(frames.pack(Piece(id=name, text=" token", tokens=1, finish=None if left > 1 else "stop")))
                if left == 1:
                    del running[name]
                    output.append(frames.pack(Finished(id=name, prompt_tokens=1, completion_tokens=1)))
            writer.write(b"".join(output))
    task = asyncio.create_task(steps())
    while True:
        frame = await frames.read_to_worker(reader)
        match frame:
            case frames.Load():
                info = frames.ModelInfo(model=frame.model, backend="cpu", device="", dtype="", context=4096, vocab=9,
                    weight_bytes=1, cache_bytes=1, cache_tokens=1)
                writer.write(frames.pack(frames.Loaded(info=info)))
            case Generate():
                writer.write(frames.pack(Started(id=frame.id, prompt_tokens=1)))
                running[frame.id] = frame.max_tokens
            case frames.AskStats():
                writer.write(frames.pack(frames.Stats(id=frame.id, running=len(running), waiting=0, cache_tokens=1,
                    cache_used=0)))
            case frames.Shutdown():
                sys.exit(0)

asyncio.run(main())
"""
DAEMON = """
import sys
from localllm.app.config import Settings
from localllm.app.daemon import lifecycle
worker = (sys.executable, sys.argv[1])
lifecycle.run(Settings(port=0, max_queue=4096), lambda at: print(at.url, flush=True), worker_command=worker)
"""


async def _read(port: int, tokens: int) -> int:
    """Read one streamed answer; returns the number of its events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "guide", "prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    events = 0
    while data := await reader.read(2**16):
        events += data.count(b"data: {")
    writer.close()
    return events


async def _spent(port: int, daemon: psutil.Process, streams: int, tokens: int) -> tuple[float, float]:
    """The processor time in seconds that the daemon spends for some streams at the same time: its own, the kernel's."""
    before = daemon.cpu_times()
    counts = await asyncio.gather(*(_read(port, tokens) for _ in range(streams)))
    if set(counts) != {tokens}:
        raise SystemExit(f"a stream lost events: {sorted(set(counts))}")
    after = daemon.cpu_times()
    return after.user - before.user, after.system - before.system


async def _measure(port: int, daemon: psutil.Process, streams: int, tokens: int) -> list[float]:
    """The times of one more token in seconds: without the start of the requests."""
    await _read(port, 1)  # loads the model
    short = await _spent(port, daemon, streams, 2)
    long = await _spent(port, daemon, streams, tokens + 2)
    return [(spent - start) / (streams * tokens) for spent, start in zip(long, short, strict=True)]


def main() -> None:
    streams, tokens = (int(text) for text in (*sys.argv[1:], "256", "60")[:2])
    with tempfile.TemporaryDirectory(prefix="lll-") as folder:
        worker = Path(folder) / "worker.py"
        worker.write_text(WORKER, "utf-8")
        env = os.environ | {
            "HOME": folder,
            "LOCALLLM_RUNTIME_DIR": f"{folder}/run",
            "XDG_STATE_HOME": f"{folder}/state",
        }
        command = [sys.executable, "-c", DAEMON, str(worker)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            own, kernel = asyncio.run(_measure(port, psutil.Process(process.pid), streams, tokens))
            process.terminate()
    print(f"{own * 1e6:.1f} us of the daemon and {kernel * 1e6:.1f} us of the kernel per token, {streams} streams")


if __name__ == "__main__":
    main()
