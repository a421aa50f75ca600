"""The MLX backend on MLX's CPU device. The same library computes on Apple's GPUs."""

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
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Delta, Request
from localllm.engine.runner import DeviceInfo, Runner

from .batches import Row
from .conformance import Conformance, Conversation, Planned
from .mlx_models import DENSE, KINDS, SAME_BITS, SLIDING, SMALL, Loaded, join_and_leave, patched, plain_model
from .mlx_operations import of_mlx_lm, of_runner, prompts
from .test_mlx_families import PAGE, Forced, near

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
class TestMlxWithoutRoom(Conformance):
    """Groups have room for one row. Other rows are read from the pool and written back."""

    backend = "mlx"
    same_bits = SAME_BITS


def test_guide_equals_the_torch_runner_token_for_token() -> None:
    with as_file(files("localllm.assets") / "guide") as folder:
        guide = read_model(folder, "guide")
        budget = LoadOptions(context=256, cache_bytes=2**26, max_rows=16, dtype="float32", threads=1)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(guide.path / "tokenizer.json"))
        questions = ["Hello!", "What is a KV cache?", "How do I stop the daemon?", "my name is Ada", "2 + 2 ="]
        chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in questions]
        answers: list[dict[str, list[int]]] = []
        for backend in (cpu, mlx):
            talk = Conversation(Planned(backend.open(guide, budget), overlap=True))
            for index, chat in enumerate(chats):
                talk.submit(str(index), tokenizer.encode(chat).ids, 24)
            answers.append(talk.finish())
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(questions)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param.label)
    request.param.save(folder)
    return Loaded(mlx.open(read_model(folder), SMALL), plain_model(folder))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
def test_sixteen_requests_that_join_and_leave_equal_mlx_lm(loaded: Loaded, overlap: bool) -> None:
    rng = np.random.default_rng(1)
    talk = join_and_leave(loaded, rng, overlap=overlap, requests=16, joins=0.4, leaves=0.03)
    assert sum(reason == "length" for reason in talk.finishes.values()) > 10


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
def test_requests_that_continue_from_the_same_pages_equal_mlx_lm(loaded: Loaded, overlap: bool) -> None:
    """The second and the third request join when the first is at the end of a page, and continue with other tokens."""
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
    """The test compares log-probabilities: a random model chooses the same tokens with any window."""
    forced = Forced(SLIDING, tmp_path)
    text = np.random.default_rng(length).integers(3, 131, length + 9).tolist()
    longer = [*text[:length], *text[::-1]]
    pages = forced.pages(len(text))
    hit = [*pages[: length // PAGE], *forced.pages(len(longer))]
    for row, start, place in ((text, 0, pages), (longer, length // PAGE * PAGE, hit)):
        expected = forced.expected(row)
        for index, end in pairwise([*range(start, length, chunk), *range(length, len(row) + 1)]):
            near(forced.step(Row(row[index:end], index, place)), expected[end - 1 : end])


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX computes on CUDA here")
def test_cpu_device_of_mlx_is_used_only_on_request() -> None:
    info = mlx.probe()
    assert isinstance(info, DeviceInfo)
    assert info.second_choice
    assert backends.choose("mlx").info.name == info.name
    assert backends.choose().backend.name != "mlx"
    assert "mlx" in backends.choose().reason.partition("not available: ")[2]


def test_model_computes_on_another_thread_than_it_was_loaded_on(tmp_path: Path) -> None:
    """The loading thread may end before the computing thread starts."""
    DENSE.save(tmp_path)
    runners, answers, ended = list[Runner](), list[int](), threading.Event()
    loading = threading.Thread(target=lambda: runners.append(mlx.open(read_model(tmp_path), SMALL)))
    loading.start()
    loading.join()

    def take(deltas: list[Delta]) -> None:
        for delta in deltas:
            answers.extend(delta.tokens)
            if delta.finish:
                ended.set()

    failures = list[RunnerFailed]()
    engine = Engine(runners[0], take, failures.append)
    engine.start()
    plain = Loaded(runners[0], plain_model(tmp_path))
    for index, prompt in enumerate([(5, 9, 77), (8,) * 40, (5, 9, 78) * 8]):
        engine.submit(Request(str(index), prompt, 20))
        assert ended.wait(100), failures
        assert answers == plain.plain(list(prompt), 20)
        answers.clear()
        ended.clear()
    engine.close()


def test_worker_needs_no_torch(tmp_path: Path) -> None:
    """A worker imports its modules, loads a model and answers in a process that cannot import torch."""
    DENSE.save(tmp_path)
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
import localllm.app.worker.worker
from localllm.backends import choose
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.request import Request
from localllm.engine.options import LoadOptions
engine, output = Engine(choose("mlx").backend.open(read_model(Path({str(tmp_path)!r})), LoadOptions(context=64))), []
engine.submit(Request("a", (5, 9, 77), 8))
while engine.has_work:
    output += [token for delta in engine.step() for token in delta.tokens]
print(output)
engine.close()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) == 8


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_step_has_few_more_operations_than_mlx_lm(loaded: Loaded, rows: int) -> None:
    """At most 1.05 times the operations of mlx-lm's loop with KVCache (one row) or BatchKVCache (several rows). With
    windows the factor is larger: mlx-lm uses ring buffers, localllm masks."""
    texts = prompts(rows)
    limit = 1.05 if not any(shape.window for shape in loaded.runner._loaded.shapes) else 1.2  # type: ignore[attr-defined]
    assert of_runner(Planned(loaded.runner, overlap=True), texts) <= limit * of_mlx_lm(loaded.model, texts)
