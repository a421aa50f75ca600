"""The MLX backend on MLX's CPU device: the library that computes on Apple's GPUs, run elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA float32 products of more than one row keep 10 bits otherwise

import mlx.core as mx

from localllm import backends
from localllm.backends import cpu, mlx
from localllm.backends.mlx import opening
from localllm.engine.engine import Engine
from localllm.engine.errors import RunnerFailed
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Delta, Request
from localllm.engine.runner import DeviceInfo, Runner
from scripts.bench.mlx_operations import of_mlx_lm, of_runner, prompts

from .batches import Row
from .conformance import Conformance, Conversation, Planned
from .mlx_models import DENSE, KINDS, SAME_BITS, SLIDING, SMALL, Loaded, join_and_leave, patched, plain_model
from .test_mlx_shapes import PAGE, Forced, near

pytestmark = pytest.mark.real_otherdevice


class RoomForAll:
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def room_for_all(cls) -> Iterator[None]:
        yield from patched(opening, "ROOM", 1000)


@pytest.mark.real_otherdevice
class TestMlx(RoomForAll, Conformance):
    backend = "mlx"
    same_bits = SAME_BITS


@pytest.mark.real_otherdevice
class TestMlxWithLittleRoom(Conformance):
    """Groups hold one row; all others are read from the pool and written back."""

    backend = "mlx"
    same_bits = SAME_BITS


def test_guide_equals_the_torch_runner_token_for_token() -> None:
    with as_file(files("localllm.assets") / "guide") as folder:
        guide = read_model(folder, "guide")
        budget = LoadOptions(context=256, cache_bytes=2**26, max_rows=16, dtype="float32", threads=1)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(guide.path / "tokenizer.json"))
        asked = ["Hello!", "What is a KV cache?", "How do I stop the daemon?", "my name is Ada", "2 + 2 ="]
        chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked]
        told: list[dict[str, list[int]]] = []
        for backend in (cpu, mlx):
            talk = Conversation(Planned(backend.open(guide, budget), overlap=True))
            for at, chat in enumerate(chats):
                talk.submit(str(at), tokenizer.encode(chat).ids, 40)
            told.append(talk.finish())
    assert told[0] == told[1]
    assert len(told[0]) == len(asked)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param.label)
    request.param.save(folder)
    return Loaded(mlx.open(read_model(folder), SMALL), plain_model(folder))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
def test_sixteen_that_join_and_leave_equal_mlx_lm(loaded: Loaded, overlap: bool) -> None:
    rng = np.random.default_rng(1)
    talk = join_and_leave(loaded, rng, overlap=overlap, requests=16, joins=0.4, leaves=0.03)
    assert sum(reason == "length" for reason in talk.finishes.values()) > 10


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
def test_two_that_go_on_from_the_same_pages(loaded: Loaded, overlap: bool) -> None:
    """The second joins where the first stands, at the end of a page, and goes on otherwise."""
    runner = Planned(loaded.runner, overlap=overlap)
    runner.spec = replace(runner.spec, max_tokens=4 * SMALL.page_size)
    rng = np.random.default_rng(7 + overlap)
    begin = rng.integers(3, 131, 4 * SMALL.page_size).tolist()
    prompts = {"first": [*begin, 5, 6, 7, 8], "second": [*begin, 9, 10, 11], "third": [*begin, 12]}
    talk = Conversation(runner)
    talk.submit("first", prompts["first"], 20)
    talk.step()
    talk.submit("second", prompts["second"], 20)
    talk.submit("third", prompts["third"], 20)
    assert talk.finish() == {name: loaded.plain(prompt, 20) for name, prompt in prompts.items()}
    assert talk.cached == {"first": 0, "second": len(begin), "third": len(begin)}


WINDOW = 6  # of SLIDING


@pytest.mark.parametrize("chunk", [1, 4, WINDOW, 64])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW])
def test_windows_are_exact_in_chunks_and_after_prefix_hits(tmp_path: Path, length: int, chunk: int) -> None:
    """Log-probabilities: with any window a random model would choose the same tokens."""
    forced = Forced(SLIDING, tmp_path)
    text = np.random.default_rng(length).integers(3, 131, length + 9).tolist()
    longer = [*text[:length], *text[::-1]]
    pages = forced.pages(len(text))
    hit = [*pages[: length // PAGE], *forced.pages(len(longer))]
    for row, start, place in ((text, 0, pages), (longer, length // PAGE * PAGE, hit)):
        wanted = forced.expected(row)
        for at, end in pairwise([*range(start, length, chunk), *range(length, len(row) + 1)]):
            near(forced.step(Row(row[at:end], at, place)), wanted[end - 1 : end])


def test_architectures() -> None:
    """Those with a module of their own, those that share one, and those there are not."""

    def told(model_type: str) -> str:
        return mlx.accepts(replace_type(model_type))

    assert told("llama") == told("mistral") == told("qwen3_moe") == ""
    assert "no architecture mystery" in told("mystery")


def replace_type(model_type: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type=model_type))


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX computes on CUDA here")
def test_its_cpu_device_is_used_only_when_asked_for() -> None:
    found = mlx.probe()
    assert isinstance(found, DeviceInfo)
    assert found.second_choice
    assert backends.choose("mlx").info.name == found.name
    assert backends.choose().backend.name != "mlx"
    assert "mlx" in backends.choose().reason.partition("not available: ")[2]


def test_it_is_loaded_on_one_thread_and_computes_on_another(tmp_path: Path) -> None:
    """The one that loads may end before the other begins."""
    DENSE.save(tmp_path)
    runners, told, done = list[Runner](), list[int](), threading.Event()
    loading = threading.Thread(target=lambda: runners.append(mlx.open(read_model(tmp_path), SMALL)))
    loading.start()
    loading.join()

    def take(deltas: list[Delta]) -> None:
        for delta in deltas:
            told.extend(delta.tokens)
            if delta.finish:
                done.set()

    failures = list[RunnerFailed]()
    engine = Engine(runners[0], take, failures.append)
    engine.start()
    plain = Loaded(runners[0], plain_model(tmp_path))
    for at, prompt in enumerate([(5, 9, 77), (8,) * 40, (5, 9, 78) * 8]):
        engine.submit(Request(str(at), prompt, 20))
        assert done.wait(30), failures
        assert told == plain.plain(list(prompt), 20)
        told.clear()
        done.clear()
    engine.close()


def test_a_worker_of_it_needs_no_torch(tmp_path: Path) -> None:
    """What a worker imports, and a model that is read and answers, where nobody can import torch."""
    DENSE.save(tmp_path)
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
import localllm.app.worker.worker
from localllm.backends import choose
from localllm.engine.engine import Engine
from localllm.engine.modelfiles import read_model
from localllm.engine.request import Request
from localllm.engine.options import LoadOptions
engine, told = Engine(choose("mlx").backend.open(read_model(Path({str(tmp_path)!r})), LoadOptions(context=64))), []
engine.submit(Request("a", (5, 9, 77), 8))
while engine.has_work:
    told += [token for delta in engine.step() for token in delta.tokens]
print(told)
engine.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 8


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decode_step_has_no_more_operations_than_mlx_lm_has(loaded: Loaded, rows: int) -> None:
    """Of one row beside mlx-lm's KVCache, of several beside its BatchKVCache: at most 1.05 times as many. Windows are
    masks here, and rings there."""
    texts = prompts(rows)
    most = 1.05 if not any(shape.window for shape in loaded.runner._loaded.shapes) else 1.2  # type: ignore[attr-defined]
    assert of_runner(Planned(loaded.runner, overlap=True), texts) <= most * of_mlx_lm(loaded.model, texts)
