"""A worker with scripted answers. The last message (or the prompt) selects the answer, the model id selects the load.

It is started like the real worker: `fake_worker.py --fd N`.

    echo WORDS       the words, a piece each          slow N           N pieces, 20 ms apart
    flood N          N pieces at once                 loud N           the same with 20 log-probabilities each
    crash            one piece, then SIGKILL          hang             Started, then nothing
    refuse           context_length_exceeded          fail             one piece, then an error
    think            reasoning, then text             call             two tool calls
    breaks           characters that split lines      body             the frame of the request, as JSON
    stopped          cancelled by the engine           silent           Finished without a finish reason
    noise            prints 5 MB to its log          garbage          bytes that are no frame
    until FILE       a piece every 20 ms until the file exists
    stall            one piece, then statistics with an endless step
    freeze SECONDS   one piece, then the process sleeps so long, then the end
    linger           one piece, then the connection closes, and later the process ends

`cache_used` of its statistics is the number of running answers. If the folder of a model has a file `wait`, the load
lasts until the file is removed. The text of the file selects the progress: "telling" all the time, "long" one frame
that announces a long load, otherwise none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import msgspec

from localllm.app import frames
from localllm.app.frames import Failed, Fault, Finished, Generate, Piece, PieceLogprob, Started, ToolCallPiece

VOCAB = 1000


class FakeWorker:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.answers: dict[str, asyncio.Task[None]] = {}
        self.stalled = 0.0  # time since the last step; 0: not stalled
        self.announced_long = False  # True after the announcement of a long load
        self.model = ""

    def send(self, frame: frames.Frame) -> None:
        self.writer.write(frames.pack(frame))

    async def serve(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await self.take(await frames.read_to_worker(self.reader))

    async def take(self, frame: frames.ToWorker) -> None:
        match frame:
            case frames.Load():
                await self.load(frame)
            case Generate():
                task = self.answers[frame.id] = asyncio.create_task(self.answer(frame))
                task.add_done_callback(lambda _: self.answers.pop(frame.id, None))
            case frames.Embed():
                task = self.answers[frame.id] = asyncio.create_task(self.embed(frame))
                task.add_done_callback(lambda _: self.answers.pop(frame.id, None))
            case frames.Cancel():
                if frame.id in self.answers:
                    self.answers[frame.id].cancel()
                    self.send(Finished(id=frame.id, cancelled=True))
            case frames.Tokenize():
                messages = (frame.request and frame.request.messages) or frame.messages or []
                text = frame.prompt or " ".join(str(message["content"]) for message in messages)
                words = text.split()
                self.send(frames.Tokens(id=frame.id, tokens=[len(word) for word in words], pieces=words))
            case frames.Detokenize() if max(frame.tokens, default=0) >= VOCAB:
                fault = Fault(code="invalid_request", message="tokens: no such token", param="tokens")
                self.send(Failed(id=frame.id, fault=fault))
            case frames.Detokenize():
                self.send(frames.Text(id=frame.id, text=" ".join("x" * token for token in frame.tokens)))
            case frames.LoadAdapter() if "broken" in frame.path:
                fault = Fault(code="adapter_unusable", message=f"adapter {frame.name}: no weights", param="lora_path")
                self.send(Failed(id=frame.id, fault=fault))
            case frames.LoadAdapter():
                print(f"loading adapter {frame.name} from {frame.path}", flush=True)
                files = {"version": "v", "base": "org/base", "warning": "another base model"}
                self.send(frames.AdapterLoaded(id=frame.id, rank=4, **files))
            case frames.UnloadAdapter():
                self.send(frames.AdapterUnloaded(id=frame.id))
            case frames.AskStats():
                running = len(self.answers)
                self.send(
                    frames.Stats(
                        id=frame.id,
                        running=running,
                        waiting=0,
                        cache_tokens=100,
                        cache_used=running,
                        preemptions=7,
                        late_compiles=3,
                        step_age=time.monotonic() - self.stalled if self.stalled else 0.0,
                    )
                )
            case frames.Shutdown():
                if self.model != "test/stubborn":
                    for name in self.answers:
                        self.send(Finished(id=name, cancelled=True))
                    await self.writer.drain()
                    sys.exit(0)

    async def load(self, frame: frames.Load) -> None:
        self.model = frame.model
        print(f"loading {frame.model}", flush=True)
        match frame.model:
            case "test/broken":
                fault = Fault(code="model_unusable", message="model.safetensors is cut short", hint="fetch it again")
                self.send(frames.LoadFailed(fault=fault))
                return
            case "test/dies":
                sys.exit(3)
            case "test/slow":
                for step in range(4):
                    self.send(frames.Loading(stage="reading weights", done=step / 4))
                    await asyncio.sleep(0.1)
        for progress in iter(lambda: _read_text(Path(frame.path) / "wait"), "on"):
            if progress == "telling" or (progress == "long" and not self.announced_long):
                self.announced_long = True
                self.send(frames.Loading(stage="reading weights", more=60.0 if progress == "long" else 0.0))
            await asyncio.sleep(0.02)
        backend = "cpu" if frame.backend == "auto" else frame.backend
        self.send(
            frames.Loaded(
                info=frames.ModelInfo(
                    model=frame.model,
                    backend=backend,
                    device="fake",
                    dtype="float32",
                    reason="it is a test",
                    quant="" if frame.options.quant == "none" else frame.options.quant,
                    context=64,
                    vocab=VOCAB,
                    weight_bytes=1000,
                    cache_bytes=24,
                    cache_tokens=100,
                    warnings=("no memory for this",) if frame.model == "test/other" else (),
                )
            )
        )

    async def answer(self, asked: Generate) -> None:
        name = asked.id
        text = _text(asked)
        verb, _, rest = text.partition(" ")
        prompt_tokens = len(text.split())
        if verb == "refuse":
            fault = Fault(
                code="context_length_exceeded",
                message="this model's maximum context length is 64 tokens, but the request needs 99",
                param="messages",
                numbers={"n_prompt_tokens": 99, "n_ctx": 64},
            )
            self.send(Failed(id=name, fault=fault))
            return
        warnings = ("a token is there twice",) if text.endswith("twice") else ()
        self.send(Started(id=name, prompt_tokens=prompt_tokens, warnings=warnings))
        made = 0
        for choice in range(asked.n):
            for piece in self.script(asked, verb, rest):
                if piece is None:
                    await self.writer.drain()
                    await asyncio.sleep(0.02)
                    continue
                made += piece.tokens
                self.send(msgspec.structs.replace(piece, id=name, choice=choice))
            match verb:
                case "garbage":
                    self.writer.write(b"\0\0\0\2{}")
                    await asyncio.sleep(3600)
                case "crash":
                    await self.writer.drain()
                    await asyncio.sleep(0.05)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    await asyncio.sleep(3600)
                case "stall":
                    self.stalled = time.monotonic()
                    await asyncio.sleep(3600)
                case "freeze":
                    await self.writer.drain()
                    _block(float(rest))
                    self.send(Piece(id=name, choice=choice, finish="stop"))
                case "linger":
                    await self.writer.drain()
                    self.writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
                    _block(2.0)  # longer than the daemon waits for the reason of a crash
                    os._exit(1)
                case "fail":
                    self.send(Failed(id=name, fault=Fault(code="internal_error", message="a step failed")))
                    return
                case "stopped":
                    self.send(Finished(id=name, cancelled=True))
                    return
                case "silent":
                    pass
                case "call":
                    self.send(Piece(id=name, choice=choice, finish="tool_calls"))
                case _:
                    self.send(Piece(id=name, choice=choice, finish="stop"))
        self.send(Finished(id=name, prompt_tokens=prompt_tokens, completion_tokens=made, cached_tokens=1))

    async def embed(self, asked: frames.Embed) -> None:
        """The vector: length of the input, sum of its token ids, requested size, running requests, length of the
        adapter's name times its scale. A text such as `hang` has the meaning that it has in a conversation."""
        name = asked.id
        if asked.input == "refuse":
            fault = Fault(code="embeddings_unsupported", message="no embedding model", param="model")
            self.send(Failed(id=name, fault=fault))
            return
        warnings = ("a token is there twice",) if asked.input == "twice" else ()
        self.send(Started(id=name, prompt_tokens=len(asked.input), warnings=warnings))
        if asked.input == "hang":
            await asyncio.sleep(3600)
        if asked.input == "fail":
            self.send(Failed(id=name, fault=Fault(code="internal_error", message="a step failed")))
            return
        await asyncio.sleep(0.01)
        ids = asked.input if isinstance(asked.input, list) else []
        adapter = len(asked.adapter or "") * asked.adapter_scale
        vector = struct.pack("<5f", len(asked.input), sum(ids), asked.dimensions or 0, len(self.answers), adapter)
        if asked.input != "silent":
            self.send(frames.Embedded(id=name, vector=vector))
        self.send(Finished(id=name, prompt_tokens=len(asked.input), cancelled=asked.input == "stopped"))

    def script(self, asked: Generate, verb: str, rest: str):
        """Pieces of one choice; None is a pause of 20 ms."""
        match verb:
            case "slow":
                for number in range(int(rest)):
                    yield _piece(asked, f"{number} ")
                    yield None
            case "until":
                while not Path(rest).exists():
                    yield _piece(asked, "more ")
                    yield None
            case "flood" | "loud":
                for number in range(int(rest)):
                    yield _piece(asked, f"{number} ", loud=verb == "loud")
            case "think":
                yield Piece(id="", reasoning="hm ", tokens=1)
                yield Piece(id="", reasoning="so", tokens=1)
                yield _piece(asked, "done")
            case "call":
                for index, name in enumerate(("add", "subtract")):
                    yield Piece(id="", tool_calls=[ToolCallPiece(index=index, id=f"call_{index}", name=name)], tokens=1)
                    for part in ('{"a":', " 1}"):
                        yield Piece(id="", tool_calls=[ToolCallPiece(index=index, arguments=part)], tokens=1)
            case "breaks":
                yield _piece(asked, "a\u2028b\u2029c\x85d\x0be\r\nf\n\ng")
            case "body":
                yield _piece(asked, msgspec.json.encode(asked).decode())
            case "crash" | "fail" | "stall" | "freeze" | "linger":
                yield _piece(asked, "one ")
            case "noise":
                # In one write, so that a read of the pipe ends inside a line.
                print("\n".join(f"{line:06d} {'x' * 92}" for line in range(50_000)), flush=True)
            case "hang" | "silent" | "stopped":
                return
            case _:
                for word in rest.split():
                    yield _piece(asked, f"{word} ")


def _piece(asked: Generate, text: str, *, loud: bool = False) -> Piece:
    logprobs = []
    if asked.logprobs is not None or loud:
        top = [
            PieceLogprob(token=f"t{rank}", id=rank, bytes=[116], logprob=-float(rank) if rank < 3 else -float("inf"))
            for rank in range(20 if loud else asked.logprobs or 0)
        ]
        logprobs = [PieceLogprob(token=text, id=1, bytes=list(text.encode()), logprob=-0.5, top=top)]
    return Piece(id="", text=text, tokens=1, logprobs=logprobs)


def _block(seconds: float) -> None:
    """Block the whole process."""
    time.sleep(seconds)


def _read_text(file: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return file.read_text()
    return "on"


def _text(asked: Generate) -> str:
    if asked.messages is not None:
        content = asked.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part["text"] for part in content or [])
    return asked.prompt if isinstance(asked.prompt, str) else f"echo {' '.join(map(str, asked.prompt or []))}"


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_args().fd)
    reader, writer = await asyncio.open_connection(sock=connection)
    await FakeWorker(reader, writer).serve()


if __name__ == "__main__":
    asyncio.run(_main())
