"""The MLX backend on MLX's own CPU device: the same library that computes on Apple's GPUs, run elsewhere."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA float32 products of more than one row keep 10 bits otherwise

import mlx.core as mx
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from localllm import backends
from localllm.backends import cpu, mlx
from localllm.backends.mlx import caches, families, opening, projections, sampler
from localllm.backends.mlx import runner as mlx_runner
from localllm.backends.mlx.attention import Attention
from localllm.backends.mlx.experts import ASKED
from localllm.backends.mlx.projections import Joined, Turned, turn_weights
from localllm.backends.mlx.residents import Residents
from localllm.backends.mlx.runner import MlxPending
from localllm.engine import sampling as oracle
from localllm.engine.batch import Want
from localllm.engine.engine import Engine
from localllm.engine.errors import ModelRefused, OutOfMemory, RunnerFailed, SettingRefused
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import DeviceInfo, Runner

from .batches import Row, make_batch
from .conformance import Conformance, Conversation, Planned
from .test_mlx_shapes import PAGE, Forced, near
from .test_sampler import VOCAB, random_row
from .tiny import TINIES, Tiny

pytestmark = pytest.mark.real_otherdevice

SMALL = LoadOptions(context=128, cache_bytes=2**24, max_rows=16, page_size=8, dtype="float32")
ONE_GROUP = None
SAME_BITS = not mx.cuda.is_available()  # its products choose their order by the number of rows


def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def no_memory(*_: object) -> None:
    """In place of what allocates."""
    raise RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")


class RoomForAll:
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def room_for_all(cls) -> Iterator[None]:
        yield from patched(Residents, "make_room", lambda *_: True)


@pytest.mark.real_otherdevice
class TestMlx(RoomForAll, Conformance):
    backend = "mlx"
    same_bits = SAME_BITS


@pytest.mark.real_otherdevice
class TestMlxWithLittleRoom(Conformance):
    """Groups hold one row; all others are read from the pool and written back."""

    backend = "mlx"
    same_bits = SAME_BITS


@pytest.mark.real_otherdevice
class TestMlxWithBounds(RoomForAll, Conformance):
    """As on CUDA: kernels are told which columns a row sees (their references compute), prompts are filled up,
    projections of one input are one product."""

    backend = "mlx"
    same_bits = SAME_BITS

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def bounds(cls) -> Iterator[None]:
        yield from patched(caches, "DECODES", True)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def filled(cls) -> Iterator[None]:
        yield from patched(caches, "PREFILL", 16)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def few(cls) -> Iterator[None]:
        yield from patched(caches, "few", lambda new, _: 1 < new <= 64)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def joined(cls) -> Iterator[None]:
        yield from patched(projections, "JOINS", True)


@pytest.mark.real_otherdevice
class TestMlxInOneGroup(RoomForAll, Conformance):
    """As S0 has it: all rows in one batch cache, however long each is."""

    backend = "mlx"
    same_bits = SAME_BITS

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def one_group(cls) -> Iterator[None]:
        yield from patched(opening, "GROUP_COLUMNS", ONE_GROUP)


@pytest.mark.parametrize("seed", range(60))
def test_sampler_equals_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(int(rng.integers(1, 12)))]
    logits = (rng.normal(size=(len(rows), VOCAB)) * rng.uniform(0.5, 5.0)).astype(np.float32)
    if seed % 3 == 0:
        logits = logits.round()  # ties everywhere
    answers = np.array([index for index, row in enumerate(rows) if row.want == Want.TOKEN], int)
    batch = make_batch(rows, VOCAB)
    if not len(answers):
        return
    drawn, expected = sampler.sample(mx.array(logits[answers]), batch), oracle.sample(logits[answers], batch)
    assert np.array(drawn.tokens).tolist() == expected.tokens.tolist()
    asked = [rows[index].sampling.logprobs for index in answers if rows[index].sampling.logprobs is not None]
    if not asked:
        assert drawn.chosen is None
        return
    most = max(asked)
    assert expected.logprobs is not None
    assert expected.top_tokens is not None
    assert expected.top_logprobs is not None
    np.testing.assert_allclose(np.array(drawn.chosen), expected.logprobs, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.array(drawn.top_tokens), expected.top_tokens[:, :most])
    np.testing.assert_allclose(np.array(drawn.top), expected.top_logprobs[:, :most], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_p": 0.5}, {1}), ({"top_p": 0.5 + 2**-20}, {0, 1}), ({"top_k": 1}, {1}), ({"min_p": 1.0}, {1})],
    ids=str,
)
def test_filters_that_are_reached_exactly(filters: dict[str, Any], kept: set[int]) -> None:
    """Two tokens of probability 1/2 each, the first a little less likely."""
    rows = [Row([1], 0, [1], sampling=Sampling(temperature=1.0, seed=seed, **filters)) for seed in range(64)]
    drawn = sampler.sample(mx.array([[-1e-30, 0.0]] * 64), make_batch(rows, 2))
    assert set(np.array(drawn.tokens).tolist()) == kept


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


_MOE = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _as_published(config: dict[str, Any]) -> None:
    """As transformers 4 wrote it, which mlx-lm reads."""
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["rope_theta"]
    config["partial_rotary_factor"] = ropes.get("partial_rotary_factor", 1.0)
    config["num_experts"] = _MOE["num_experts"]


DENSE = next(tiny for tiny in TINIES if tiny.label == "qwen3")
SLIDING = next(tiny for tiny in TINIES if tiny.label == "gemma3-old")  # mlx-lm reads a pattern, no layer_types
EXPERTS = Tiny("qwen3_moe", "qwen3_moe", _MOE, rewrite=_as_published)
KINDS = [DENSE, SLIDING, EXPERTS]


def plain_model(folder: Path) -> Any:
    """For mlx-lm's own loop; test_mlx_shapes.py compares it with transformers."""
    return mlx_lm.utils.load_model(folder, **families.loading(read_model(folder).config, 128))[0]


@dataclass
class Loaded:
    """A tiny model on our runner, and as mlx-lm itself runs it."""

    runner: Runner
    model: Any

    def plain(self, prompt: list[int], count: int) -> list[int]:
        """mlx-lm's own loop: one request, its own caches, the likeliest token each time."""
        caches, tokens = make_prompt_cache(self.model), list[int]()
        logits = self.model(mx.array([prompt]), cache=caches)[0, -1]
        for _ in range(count):
            tokens.append(int(mx.argmax(logits)))
            logits = self.model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
        return tokens


@pytest.fixture(scope="module", params=KINDS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param.label)
    request.param.save(folder)
    return Loaded(mlx.open(read_model(folder), SMALL), plain_model(folder))


def join_and_leave(
    loaded: Loaded, rng: np.random.Generator, *, overlap: bool, requests: int, joins: float, leaves: float = 0.0
) -> Conversation:
    """Each gets the tokens of mlx-lm's own loop. `joins`, `leaves`: how likely a step is the first or last of one."""
    talk, prompts = Conversation(Planned(loaded.runner, overlap=overlap)), dict[str, list[int]]()
    waiting = [f"r{number}" for number in range(requests)]
    while waiting or talk.engine.has_work:
        if waiting and rng.random() < joins:
            name = waiting.pop()
            prompts[name] = rng.integers(3, 131, int(rng.integers(1, 50))).tolist()
            talk.submit(name, prompts[name], int(rng.integers(1, 40)))
        if rng.random() < leaves and talk.engine.has_work:
            talk.engine.cancel(str(rng.choice(list(prompts))))
        talk.step()
    for name, prompt in prompts.items():
        assert talk.tokens[name] == loaded.plain(prompt, len(talk.tokens[name])), name
    return talk


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


def test_rows_that_join_lie_in_the_order_of_the_batch(loaded: Loaded) -> None:
    """Then steps that go on with the last one look at no row, and sort no logits."""
    talk, rng = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(2)
    prompts = {name: rng.integers(3, 131, 20).tolist() for name in "abcde"}
    for names in ("ab", "cd", "e"):
        for name in names:
            talk.submit(name, prompts[name], 30)
        talk.step()
        talk.step()
    for _ in range(6):
        talk.step()
    assert loaded.runner._before.work.rows == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    assert talk.finish() == {name: loaded.plain(prompt, 30) for name, prompt in prompts.items()}


WINDOW = 6  # of SLIDING


@pytest.mark.parametrize("bounds", [False, True], ids=["masks", "bounds"])
@pytest.mark.parametrize("chunk", [1, 4, WINDOW, 64])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW])
def test_windows_are_exact_in_chunks_and_after_prefix_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, chunk: int, bounds: bool
) -> None:
    """Log-probabilities: with any window a random model would choose the same tokens. `bounds` as on CUDA."""
    if bounds:
        monkeypatch.setattr(caches, "DECODES", True)
        monkeypatch.setattr(caches, "few", lambda new, _: 1 < new <= 64)
    forced = Forced(SLIDING, tmp_path)
    text = np.random.default_rng(length).integers(3, 131, length + 9).tolist()
    longer = [*text[:length], *text[::-1]]
    pages = forced.pages(len(text))
    hit = [*pages[: length // PAGE], *forced.pages(len(longer))]
    for row, start, place in ((text, 0, pages), (longer, length // PAGE * PAGE, hit)):
        wanted = forced.expected(row)
        for at, end in pairwise([*range(start, length, chunk), *range(length, len(row) + 1)]):
            near(forced.step(Row(row[at:end], at, place)), wanted[end - 1 : end])


def quantised(folder: Path, **how: Any) -> None:
    """The model in `folder` as mlx-lm's converter writes it."""
    model, config = mlx_lm.utils.load_model(folder)
    model, config = mlx_lm.utils.quantize_model(model, config, **how)
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")


FORMATS: dict[str, dict[str, Any]] = {
    "4-bit": {"group_size": 32, "bits": 4},
    "8-bit": {"group_size": 32, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_checkpoints(tmp_path: Path, form: str) -> None:
    tiny = replace(DENSE, more={**DENSE.more, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32})
    tiny.save(tmp_path)
    quantised(tmp_path, **FORMATS[form])
    found = read_model(tmp_path)
    assert cpu.accepts(found) == "its weights are in MLX's format"
    loaded = Loaded(mlx.open(found, replace(SMALL, dtype="auto")), plain_model(tmp_path))
    assert loaded.runner.spec.quant == f"mlx {form}"
    talk, prompts = Conversation(loaded.runner), [[5, 9, 77, 30], [8, 100, 3]]
    for at, prompt in enumerate(prompts):
        talk.submit(str(at), prompt, 10)
    assert talk.finish() == {str(at): loaded.plain(prompt, 10) for at, prompt in enumerate(prompts)}


# Inputs of a projection: twice as many as share a scale. For no more than those, as no real model has them, MLX 0.32
# compiles a kernel of its own on Hopper, which takes two minutes and computes something else in float32.
WIDE = 128


@pytest.mark.parametrize(("quant", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_are_made_smaller_while_loading(tmp_path: Path, quant: Any, bits: int) -> None:
    tiny = replace(DENSE, more={**DENSE.more, "hidden_size": WIDE, "intermediate_size": WIDE, "head_dim": 32})
    tiny.save(tmp_path / "plain")
    tiny.save(tmp_path / "ours")
    quantised(tmp_path / "plain", group_size=64, bits=bits)
    runner = mlx.open(read_model(tmp_path / "ours"), replace(SMALL, quant=quant))
    assert runner.spec.quant == quant
    talk, prompt = Conversation(runner), [5, 9, 77, 59]  # its tokens lead by 0.17 at least: CUDA's products are rounded
    talk.submit("a", prompt, 10)
    plain = Loaded(runner, plain_model(tmp_path / "plain"))
    assert talk.finish() == {"a": plain.plain(prompt, 10)}


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (LoadOptions(quant="fp8"), "quant fp8"),
        (LoadOptions(cache_dtype="fp8"), "cache_dtype fp8"),
        (LoadOptions(attention="flashinfer"), "attention flashinfer"),
        (LoadOptions(graphs="full"), "graphs full"),
        (LoadOptions(reference_ops=("norm",)), "reference_ops"),
    ],
)
def test_settings_it_cannot_honour_are_refused(tmp_path: Path, budget: LoadOptions, told: str) -> None:
    DENSE.save(tmp_path)
    with pytest.raises(SettingRefused, match=told):
        mlx.open(read_model(tmp_path), budget)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def test_checkpoints_with_code_are_refused(tmp_path: Path) -> None:
    DENSE.save(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    rewrite(tmp_path, lambda config: config.update(model_file="own.py"))
    with pytest.raises(ModelRefused, match="code of its own"):
        mlx.open(read_model(tmp_path), SMALL)


@pytest.mark.parametrize("broken", ["no model in it", "torn weights"])
def test_what_mlx_lm_cannot_load_is_refused(tmp_path: Path, broken: str) -> None:
    DENSE.save(tmp_path)
    found = read_model(tmp_path)
    if broken == "torn weights":  # after they were looked at
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    else:  # a module of mlx-lm's models that is no architecture
        rewrite(tmp_path, lambda config: config.update(model_type="rope_utils"))
    with pytest.raises(ModelRefused, match="cannot be loaded by mlx-lm"):
        mlx.open(found, SMALL)


@pytest.mark.parametrize("leaves", [SystemExit(1), ModuleNotFoundError("No module named 'hf_olmo'")], ids=repr)
def test_architectures_that_want_another_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: BaseException
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise leaves

    DENSE.save(tmp_path)
    monkeypatch.setattr("localllm.backends.mlx.loading.load_model", never)
    with pytest.raises(ModelRefused, match="wants another package"):
        mlx.open(read_model(tmp_path), SMALL)


def test_recurrent_layers_are_refused_by_name(tmp_path: Path) -> None:
    Tiny(
        "next",
        "qwen3_next",
        {
            **_MOE,
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attention_interval": 2,
        },
        rewrite=_as_published,
    ).save(tmp_path)
    with pytest.raises(ModelRefused, match="ArraysCache"):
        mlx.open(read_model(tmp_path), SMALL)


def test_attention_of_a_model_s_own_is_refused_by_name(tmp_path: Path) -> None:
    """Gemma 2's never asks mlx-lm's: it cannot read several groups, nor columns that a kernel of ours reads."""
    Tiny("gemma2", "gemma2", {"head_dim": 12, "tie_word_embeddings": True}).save(tmp_path)
    with pytest.raises(ModelRefused, match=r"gemma2.*attention of its own"):
        mlx.open(read_model(tmp_path), SMALL)


def test_own_kernel_of_experts_is_for_those_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Metal the op is its reference: the same tokens, through our way into the model."""
    tiny = replace(EXPERTS, more={**_MOE, "hidden_size": WIDE, "moe_intermediate_size": WIDE})
    tiny.save(tmp_path)
    told = []
    for asked in ("", "1"):
        monkeypatch.setenv(ASKED, asked)
        runner = mlx.open(read_model(tmp_path), replace(SMALL, quant="int4"))
        kinds = {type(part).__name__ for part in runner._loaded.model.modules()}  # type: ignore[attr-defined]
        assert ("FusedExperts" in kinds) == bool(asked)
        talk = Conversation(runner)
        for at in range(3):
            talk.submit(str(at), [5, 9, 77, 30 + at], 12)
        told.append(talk.finish())
    assert told[0] == told[1]


def test_architectures() -> None:
    """Those with a module of their own, those that share one, and those there are not."""

    def told(model_type: str) -> str:
        return mlx.accepts(replace_type(model_type))

    assert told("llama") == told("mistral") == told("qwen3_moe") == ""
    assert "no architecture mystery" in told("mystery")


def test_an_architecture_without_a_vocabulary_is_refused_by_field(tmp_path: Path) -> None:
    DENSE.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "olmo2", "vocab_size": None}))
    with pytest.raises(ModelRefused, match="vocab_size should be a whole number"):
        mlx.open(read_model(tmp_path), SMALL)


def replace_type(model_type: str) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(config=SimpleNamespace(model_type=model_type))


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX computes on CUDA here")
def test_its_cpu_device_is_used_only_when_asked_for() -> None:
    found = mlx.probe()
    assert isinstance(found, DeviceInfo)
    assert found.second_choice
    assert backends.choose("mlx").info.name == found.name
    assert backends.choose().backend.name != "mlx"
    assert "not mlx" in backends.choose().reason


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


def test_a_prefix_that_many_share_does_not_lie_in_memory_for_each(tmp_path: Path) -> None:
    """Pages hold it once, so the engine lets them all in; groups would hold it once for each."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**20, max_rows=12))
    plain = Loaded(runner, plain_model(tmp_path))
    residents: Residents = runner._residents  # type: ignore[attr-defined]
    shared = np.random.default_rng(0).integers(3, 131, 64).tolist()
    talk = Conversation(runner)
    talk.submit("first", shared, 1)
    talk.finish()
    for at in range(12):
        talk.submit(str(at), [*shared, at + 3], 20)
    most = 0
    while talk.engine.has_work:
        talk.step()
        most = max(most, residents.groups.columns)
    assert most <= residents.groups.room
    assert talk.engine.stats().preemptions == 0
    for at in range(12):
        assert talk.tokens[str(at)] == plain.plain([*shared, at + 3], 20)


def test_what_mlx_keeps_is_given_back_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.backends.mlx.runner.IDLE", 0.2)
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), SMALL)
    residents: Residents = runner._residents  # type: ignore[attr-defined]
    told = Loaded(runner, plain_model(tmp_path)).plain([5] * 100, 20)
    talk = Conversation(runner)
    for name in "abc":  # the second and third begin with pages of the first, whose group is gone
        talk.submit(name, [5] * 100, 20)
        talk.finish()
        busy = mx.get_cache_memory() and residents.groups.columns
        deadline = time.monotonic() + 20
        while (mx.get_cache_memory() or residents.groups.columns) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert busy > 0 == mx.get_cache_memory() == residents.groups.columns
        assert talk.tokens[name] == told
    assert talk.cached["c"] >= 96


def test_no_rest_while_a_step_is_unread(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one takes longer than the pause after which nobody seems to compute."""
    runner: Any = loaded.runner
    ahead, turns = Planned(loaded.runner, overlap=True), list[int]()
    monkeypatch.setattr(runner._rest, "_seconds", 0.05)
    own = MlxPending.result

    def slow(pending: MlxPending) -> Any:
        time.sleep(0.3)
        turns.append(runner._residents.groups.columns)
        return own(pending)

    monkeypatch.setattr(MlxPending, "result", slow)
    talk = Conversation(ahead)
    talk.submit("a", [5] * 30, 4)
    talk.finish()
    assert min(turns) > 0
    assert talk.tokens["a"] == loaded.plain([5] * 30, 4)
    deadline = time.monotonic() + 20
    while runner._residents.groups.columns and time.monotonic() < deadline:
        time.sleep(0.05)
    assert runner._residents.groups.columns == 0


def test_a_prompt_is_filled_up_within_the_context_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "PREFILL", 64)
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, context=100))
    model, filled = Loaded(runner, plain_model(tmp_path)), list[int]()
    trunk: Any = runner._loaded.trunk  # type: ignore[attr-defined]
    own = trunk.call

    def call(model: Any, tokens: mx.array, *more: Any) -> Any:
        filled.append(tokens.shape[1])
        return own(model, tokens, *more)

    monkeypatch.setattr(trunk, "call", call)
    talk = Conversation(runner)
    for name, length in (("short", 60), ("long", 70)):
        talk.submit(name, [5] * length, 2)
        talk.finish()
        assert talk.tokens[name] == model.plain([5] * length, 2)
    assert filled[:2] == [64, 1]
    assert max(filled) == 64, "the long one goes on after the short one's pages"
    talk.submit("other", [6] * 70, 2)
    talk.finish()
    assert max(filled) == 70


def test_prompts_that_come_together_are_computed_together(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those filled up to the same length in one call, each with its own last token."""
    monkeypatch.setattr(caches, "PREFILL", 16)
    runner: Any = loaded.runner
    trunk, called = runner._loaded.trunk, list[tuple[int, ...]]()
    own = trunk.call

    def call(model: Any, tokens: mx.array, *more: Any) -> Any:
        called.append(tokens.shape)
        return own(model, tokens, *more)

    monkeypatch.setattr(trunk, "call", call)
    talk, rng = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(3)
    lengths = {"a": 17, "b": 5, "c": 32, "d": 40, "e": 30, "f": 1, "g": 32}
    prompts = {name: rng.integers(3, 131, length).tolist() for name, length in lengths.items()}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 9)
    before = set(map(id, runner._residents.groups))
    talk.step()
    new = [len(placed.residents) for placed in runner._residents.groups if id(placed) not in before]
    assert sorted(new) == [1, 1, 1, 1, 1, 2], "c and g, of one length, lie together"
    assert called == [(4, 32), (1, 16), (1, 48), (1, 1)]
    talk.finish()
    assert talk.tokens == {name: loaded.plain(prompt, 9) for name, prompt in prompts.items()}


def test_a_worker_of_it_needs_no_torch(tmp_path: Path) -> None:
    """What a worker imports, and a model that is read and answers, where nobody can import torch."""
    DENSE.save(tmp_path)
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
import localllm.app.daemon.worker
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


def test_meeting_many_shapes_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA MLX raises once it has met twice as many as it keeps plans for: a server meets them over days."""
    monkeypatch.delenv(opening.THRASHING, raising=False)
    DENSE.save(tmp_path)
    mlx.open(read_model(tmp_path), SMALL)
    assert os.environ[opening.THRASHING] == "0"
    monkeypatch.setenv(opening.THRASHING, "1")
    mlx.open(read_model(tmp_path), SMALL)
    assert os.environ[opening.THRASHING] == "1", "whoever wants to know is told"


def test_plain_projections_lie_ready_in_the_memory_of_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "JOINS", False)
    DENSE.save(tmp_path)
    model = plain_model(tmp_path)
    weights = dict(tree_flatten(model.parameters()))
    x, projection = mx.random.normal((3, 48)), model.model.layers[0].self_attn.q_proj
    told, before = projection(x), mx.get_active_memory()
    turn_weights(model)
    assert mx.get_active_memory() <= before + 64
    assert isinstance(projection, Turned)
    assert dict(tree_flatten(model.parameters())).keys() == weights.keys()
    assert mx.array_equal(projection(x), told)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_projections_of_one_input_are_one_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Tiny) -> None:
    """The same tokens, and weights that lie in memory once."""
    kind.save(tmp_path)
    sizes, told = list[int](), list[Any]()
    runner: Any = None
    for joins in (False, True):
        monkeypatch.setattr(projections, "JOINS", joins)
        runner = None
        gc.collect()
        mx.clear_cache()  # a buffer taken from it may be larger than what lies in it
        before = mx.get_active_memory()
        runner = mlx.open(read_model(tmp_path), SMALL)
        mx.synchronize()
        sizes.append(mx.get_active_memory() - before)
        talk = Conversation(runner)
        for at in range(3):
            talk.submit(str(at), [5, 9, 77, 30 + at], 20)
        told.append(talk.finish())
        joined = [type(part) for part in runner._loaded.model.modules()].count(Joined)
        assert joined == joins * len(runner._loaded.model.layers) * (3 if kind is EXPERTS else 5)
        names = [name for name, _ in tree_flatten(runner._loaded.model.parameters())]
        assert len(names) == len(set(names))
        assert any("k_proj.weight" in name for name in names)
    assert told[0] == told[1]
    assert sizes[1] <= sizes[0] + 2**14


def test_projections_that_are_not_all_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a step that breaks off: answers are right, one product is enough for the next, and nothing is kept."""
    monkeypatch.setattr(projections, "JOINS", True)
    DENSE.save(tmp_path)
    model = plain_model(tmp_path)
    layer = model.model.layers[0].self_attn
    weights = {name: mx.array(layer[name].weight) for name in ("q_proj", "k_proj", "v_proj")}
    turn_weights(model)
    inputs = list[mx.array]()

    def multiplied(x: mx.array, weight: mx.array, turned: mx.array) -> mx.array:
        inputs.append(x)
        return x @ turned

    monkeypatch.setattr(projections, "_multiplied", multiplied)
    for asked, products in (("qkv", 1), ("v", 1), ("kkq", 2), ("vqk", 1)):
        inputs.clear()
        x = mx.random.normal((2, 3, 48))
        for name in (f"{letter}_proj" for letter in asked):
            assert mx.allclose(layer[name](x), x @ weights[name].T, atol=1e-5), asked
        assert len(inputs) == products, asked
    product = layer.q_proj.product
    assert product._x is None
    assert not product._parts


@pytest.mark.parametrize("new", [1, 5], ids=["one token", "few tokens"])
@pytest.mark.parametrize("rows", [[3], [3, 2]], ids=["one group", "two groups"])
def test_layers_that_read_the_keys_of_another_or_have_sinks(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], new: int
) -> None:
    """As those of gemma4: mlx-lm hands them keys and a mask, and no cache. As gpt-oss: MLX computes it."""
    monkeypatch.setattr(caches, "DECODES", True)
    monkeypatch.setattr(caches, "few", lambda new, _: 1 < new <= 64)
    shape, total = caches.LayerShape(2, 64, 64, mx.float32, 0), sum(rows)
    groups = [caches.Group.empty([shape], 2 * caches.STEP, count) for count in rows]
    for group in groups:
        group.append(0, *mx.random.normal((2, len(group.padding), 2, caches.STEP, 64)))
        group.end = caches.STEP
    [layer] = caches.Forward(groups, new, [shape]).layers()
    attention = Attention(base.scaled_dot_product_attention)
    mask, queries = layer.make_mask(new), mx.random.normal((total, 4, new, 64))
    keys, values = layer.update_and_fetch(*mx.random.normal((2, total, 2, new, 64)))
    own, other = (attention(queries, keys, values, cache, 0.125, mask) for cache in (layer, None))
    assert mx.allclose(own, other, atol=1e-6)

    held = [mx.concatenate([getattr(group, name)[0] for group in groups]) for name in ("keys", "values")]
    held = [x[:, :, : caches.STEP + new] for x in held]
    for sinks, found in ((None, own), (mx.ones(4), attention(queries, keys, values, layer, 0.125, mask, mx.ones(4)))):
        plain = mx.fast.scaled_dot_product_attention(queries, *held, scale=0.125, mask="causal", sinks=sinks)
        assert mx.allclose(found, plain, atol=1e-5)


def test_few_tokens_see_no_more_columns_than_their_window() -> None:
    """By which their kernel is told how many warps share them."""
    group = caches.Group([], [], 500, [3, 0])
    assert [group.seen_by_few(5, window).together for window in (0, 24, 1000)] == [505, 28, 505]


def test_bytes_that_a_token_reads(tmp_path: Path) -> None:
    DENSE.save(tmp_path / "dense")
    EXPERTS.save(tmp_path / "experts")
    spec = mlx.open(read_model(tmp_path / "dense"), SMALL).spec
    assert spec.weight_bytes - spec.token_bytes == 131 * 48 * 4, "of the embedding only one row is read"
    assert mlx.open(read_model(tmp_path / "experts"), SMALL).spec.token_bytes == 0


def test_nothing_is_left_after_aborts(loaded: Loaded) -> None:
    """Requests that go in the middle of a step that is planned ahead; memory is what it was."""
    talk = Conversation(Planned(loaded.runner, overlap=True))

    def churn(turn: int) -> None:
        rng = np.random.default_rng(turn)
        for number in range(6):
            talk.submit(f"{turn}-{number}", rng.integers(3, 131, int(rng.integers(20, 60))).tolist(), 30)
        for _ in range(8):
            talk.step()
        for number in range(6):
            talk.engine.cancel(f"{turn}-{number}")
        while talk.engine.has_work:
            talk.step()

    def memory() -> int:
        mx.synchronize()
        gc.collect()
        return mx.get_active_memory()

    churn(0)
    churn(1)
    before = memory()
    for turn in range(2, 12):
        churn(turn)
    assert memory() <= before + 2**20


def goes_on_after_a_shortage(loaded: Loaded, talk: Conversation, prompts: dict[str, list[int]]) -> None:
    """Requests a, b and c ended by it, with right tokens until then; two more get theirs whole."""
    for name, prompt in (("d", "c"), ("e", "a")):
        talk.submit(name, prompts[prompt], 12)
    talk.finish()
    ends = {name: talk.finishes[name] for name in "abcde"}
    assert ends == {"a": "no_memory", "b": "no_memory", "c": "no_memory", "d": "length", "e": "length"}
    for name, prompt in (("a", "a"), ("b", "b"), ("d", "c"), ("e", "a")):
        assert talk.tokens[name] == loaded.plain(prompts[prompt], len(talk.tokens[name]))
    assert len(talk.tokens["d"]) == len(talk.tokens["e"]) == 12


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("cached", [0, 24], ids=["new", "goes-on"])
@pytest.mark.parametrize("room", [True, False], ids=["in-groups", "passing"])
def test_a_step_without_memory_ends_its_requests_and_no_others(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, overlap: bool, cached: int, room: bool
) -> None:
    """As if MLX's allocator refused: what the step was to write is never read, what others share stays right."""
    if not room:
        monkeypatch.setattr(Residents, "make_room", lambda *_: False)
    talk, rng = Conversation(Planned(loaded.runner, overlap=overlap)), np.random.default_rng(5)
    begun = rng.integers(3, 131, cached).tolist()
    prompts = {name: [*begun, *rng.integers(3, 131, 30).tolist()] for name in "abc"}
    if cached:
        talk.submit("first", [*begun, 5], 4)
        talk.finish()
    for name in "ab":
        talk.submit(name, prompts[name], 12)
    for _ in range(4):
        talk.step()
    own = mx.async_eval

    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.submit("c", prompts["c"], 12)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", own)
    goes_on_after_a_shortage(loaded, talk, prompts)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("writing", [False, True], ids=["caches", "pages"])
def test_a_shortage_that_only_answers_tell(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, overlap: bool, writing: bool
) -> None:
    """As if Metal refused what was sent to it: requests end; where pages were written that others read, all ends."""
    talk, rng = Conversation(Planned(loaded.runner, overlap=overlap)), np.random.default_rng(11)
    prompts = {name: rng.integers(3, 131, 30).tolist() for name in "abc"}
    for name, count in (("a", 30), ("b", 30), ("c", 3 if writing else 30)):
        talk.submit(name, prompts[name], count)
    while len(talk.tokens["c"]) < 3:
        talk.step()
    while writing and not loaded.runner._wrote_pages[0]:  # type: ignore[attr-defined]
        talk.step()  # it has ended; its row is given up, and pages take what it computed

    def full(*_: object) -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    monkeypatch.setattr(mlx_runner, "_values", full)
    if writing:
        with pytest.raises(RunnerFailed, match="while pages were written"):
            talk.step()
        return
    talk.step()
    monkeypatch.undo()
    goes_on_after_a_shortage(loaded, talk, prompts)


def test_pages_that_a_step_without_memory_was_to_write(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made from what the step before computes: where that is lost, too, others would read what is nowhere."""
    talk, rng, runner = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(12), loaded.runner
    for name, count in (("a", 30), ("b", 30), ("c", 3)):
        talk.submit(name, rng.integers(3, 131, 30).tolist(), count)
    own, places = runner._called, runner._residents.pool  # type: ignore[attr-defined]

    def full(*_: object) -> Any:
        raise OutOfMemory("full")

    def called(*given: Any) -> Any:
        if talk.tokens["a"] and places.changed:  # the row of c was given up just now
            monkeypatch.setattr(mlx_runner, "_values", full)
            full()
        return own(*given)

    monkeypatch.setattr(runner, "_called", called)
    with pytest.raises(RunnerFailed, match="while pages were written"):
        talk.finish()


def held(loaded: Loaded, base: int) -> int:
    """Bytes of arrays above `base` that somebody has, Python's cycles among them."""
    mx.synchronize(loaded.runner._stream)  # type: ignore[attr-defined]
    return mx.get_active_memory() - base


@pytest.fixture
def at_rest(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Bytes in use at rest. Nothing is collected meanwhile: what is old a worker never looks at again."""
    runner: Any = loaded.runner
    talk = Conversation(Planned(loaded.runner, overlap=False))
    talk.submit("warm", [5] * 4, 2)
    talk.finish()
    monkeypatch.setattr(runner._rest, "_seconds", 600)
    runner._give_back()
    gc.collect()
    gc.disable()
    yield held(loaded, 0)
    gc.enable()


def test_at_rest_groups_are_gone_at_once(loaded: Loaded, at_rest: int) -> None:
    talk = Conversation(Planned(loaded.runner, overlap=False))
    for name in "abcd":
        talk.submit(name, [5 + ord(name) % 100] * 60, 60)
    talk.finish()
    assert held(loaded, at_rest) > 2**19
    loaded.runner._give_back()  # type: ignore[attr-defined]
    assert held(loaded, at_rest) < 2**14


def test_after_a_shortage_its_groups_are_gone_at_once(
    loaded: Loaded, at_rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, own = Conversation(Planned(loaded.runner, overlap=False)), mx.async_eval
    for name in "abcd":
        talk.submit(name, [5 + ord(name) % 100] * 60, 60)
    for _ in range(10):
        talk.step()
    assert held(loaded, at_rest) > 2**19

    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", own)
    assert set(talk.finishes.values()) == {"no_memory"}
    assert held(loaded, at_rest) < 2**14
    residents: Residents = loaded.runner._residents  # type: ignore[attr-defined]
    assert residents.take_changed(), "what was written before the step is asked for by the next"
    residents.ask_again()


def test_what_a_rest_without_memory_did_not_write_the_next_step_asks_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = loaded.runner
    talk = Conversation(Planned(loaded.runner, overlap=False))
    talk.submit("a", [5] * 30, 4)
    talk.finish()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        runner._give_back()
    assert runner._residents.pool.changed
    talk.submit("b", [5] * 30, 4)
    talk.finish()
    assert talk.tokens["b"] == talk.tokens["a"] == loaded.plain([5] * 30, 4)


def test_which_products_are_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked for no others: a step of one row would be longer for that."""
    asked, weight = list[int](), mx.ones((6, 4))

    def product(x: mx.array, *_: mx.array) -> mx.array:
        asked.append(x.size // 4)
        return x @ weight.T

    monkeypatch.setattr(projections, "FEW_ROWS", True)
    monkeypatch.setattr(projections, "product", product)
    for shape in ((1, 1), (2, 1), (1, 2), (4, 4), (17, 1)):
        assert mx.array_equal(projections._multiplied(mx.ones((*shape, 4)), weight, weight.T), mx.full((*shape, 6), 4))
    assert asked == [2, 2, 16]
