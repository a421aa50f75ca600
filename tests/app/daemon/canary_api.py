"""A daemon whose real worker runs the canary model, so that each answer over HTTP is known token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from localllm.app.daemon.process import COMMAND

from ...backends import canary
from .conftest import Daemon, events

MODEL = "test/canary"
# The texts of the 16 symbols, with which the model can write JSON and begin a tool call, and of the 5 keys.
TEXTS = (*'{":,}\nnamerguts', "<tool_call>", *"VW ", "</s>", "</tool_call>")
# The other bytes, in the letters of byte-level BPE: structured output needs a token for every byte.
OTHER = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {text.replace("\n", "Ċ").replace(" ", "Ġ") for text in TEXTS})
PROMPT = canary.prompt(key=1, length=40, seed=0)
SHIFTS = {"": 0, "one": 1, "two": 2, "three": 3, "four": 4}  # name of an adapter, or the base model -> shift
LONG = 420  # tokens; the answer still runs while an adapter is loaded


@cache
def answer(shift: int, count: int = 24) -> str:
    """The right answer to PROMPT under the adapter with this shift; 0: the base model."""
    return text_of(canary.walk(canary.under(PROMPT, shift), count))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


class Api:
    """Requests to the daemon over its unix socket."""

    def __init__(self, daemon: Daemon) -> None:
        self.http = daemon.local()
        self.http.timeout = httpx.Timeout(100)
        self.folder = daemon.folder

    def load(self, name: str, shift: int, **more: Any) -> None:
        """Load an adapter that adds `shift` to the key of the prompt."""
        response = self.post_load(name, canary.save_adapter(self.folder / f"shift-{shift}", shift), **more)
        assert response.status_code == 200, response.text

    def post_load(self, name: str, folder: Path, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(folder), "model": MODEL} | more
        return self.http.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> None:
        response = self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert response.status_code == 200, response.text

    def complete(self, adapter: str = "", **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=request_body(adapter) | more)

    def text(self, adapter: str = "", **more: Any) -> str:
        response = self.complete(adapter, **more)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def running(self) -> int:
        """The number of answers that run."""
        (model,) = self.http.get("/admin/loaded").json()
        return int(model["requests"])

    @contextmanager
    def stream(self, adapter: str = "") -> Iterator[Callable[[], str]]:
        """A long answer that has begun; the function returns its text at the end."""
        body = request_body(adapter) | {"stream": True, "max_tokens": LONG}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            begun = [next(lines), next(lines), next(lines)]

            def text() -> str:
                chunks = events("\n".join([*begun, *lines]))
                assert "error" not in chunks[-1], chunks[-1]
                return "".join(chunk["choices"][0]["text"] for chunk in chunks)

            yield text


def request_body(adapter: str) -> dict[str, Any]:
    model = f"{MODEL}:{adapter}" if adapter else MODEL
    return {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def write_canary(repo: Path) -> None:
    """The canary model in a Hugging Face cache, with a tokenizer and a chat template that is the first message."""
    snapshot = repo / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123456789abcdef")
    canary.save(snapshot, padding=len(OTHER))
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": TEXTS.index("</s>")}))
    in_bytes = {text.replace("\n", "Ċ").replace(" ", "Ġ"): index for index, text in enumerate((*TEXTS, *OTHER))}
    tokenizer = Tokenizer(models.BPE(vocab=in_bytes, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(snapshot / "tokenizer.json"))
    template = "{% if tools %}{% endif %}{{ messages[0].content }}"
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def serve(folder: Path) -> Iterator[Api]:
    """Start a daemon in the folder, and stop it after the yield."""
    write_canary(folder / "hub/models--test--canary")
    env = {"TEST_WORKER": json.dumps(COMMAND), "OMP_NUM_THREADS": "1"}
    daemon = Daemon(
        folder, env=env, backend="cpu", dtype="float32", cache_mib=16, max_rows=8, threads=1, adapter_slots=4
    )
    assert daemon.url
    api = Api(daemon)
    yield api
    api.http.close()
    assert daemon.stop() == 0, daemon.log
    assert "Traceback" not in daemon.log, daemon.log
