"""Hidden states of prompts against transformers' last_hidden_state: every family and backend, in batches, in chunks,
and behind prefix hits."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, PreTrainedModel

from localllm.backends import cpu
from localllm.engine.engine import Engine
from localllm.engine.files.families import FAMILIES
from localllm.engine.files.model_files import read_model
from localllm.engine.files.pooling import Pooling, read_pooling
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request
from localllm.engine.runner import Runner

from ..app.embedder import write_embedder
from .tiny import HYBRIDS, TINIES, VOCAB, Tiny

BOUND = 1e-4
OPTIONS = LoadOptions(cache_bytes=2**22, max_rows=8, max_step_tokens=16, page_size=8, threads=1, dtype="float32")
LENGTHS = (1, 2, 9, 16, 17, 40)
REFUSED_BY_MLX = ("deepseek_v2", "gemma2", "gpt_oss", *HYBRIDS)
PLAIN = [tiny for tiny in TINIES if tiny.label in (*FAMILIES, "gemma3", "llama-tied")]


def prompts_of(vocab: int) -> list[list[int]]:
    """Prompts of several lengths, some of which share a beginning."""
    generator = torch.Generator().manual_seed(5)
    stem = torch.randint(3, vocab, (max(LENGTHS),), generator=generator).tolist()
    prompts = [stem[:length] for length in LENGTHS]
    return [*prompts, [*stem[:20], *torch.randint(3, vocab, (12,), generator=generator).tolist()]]


def expected_states(model: PreTrainedModel, prompts: Sequence[list[int]]) -> np.ndarray:
    """[prompts, hidden]"""
    with torch.inference_mode():
        return np.stack([model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in prompts])


def states_of(runner: Runner, prompts: Sequence[list[int]], bound: float = BOUND) -> np.ndarray:
    """[prompts, hidden], with rows that draw tokens in the same steps. Closes the runner."""
    engine = Engine(runner)
    states: dict[str, np.ndarray] = {}
    cached = 0
    try:
        for name in ("cold", "cached"):
            for index, prompt in enumerate(prompts):
                engine.submit(Request(f"{name}{index}", tuple(prompt), 0, wants_hidden=True))
                engine.submit(Request(f"chat{index}", tuple(prompt), 3))
            while engine.has_work:
                for delta in engine.step():
                    if delta.hidden is not None:
                        states[delta.request_id] = delta.hidden
                        cached += delta.cached
    finally:
        engine.close()
    assert cached > 0
    first, second = [[states[f"{name}{index}"] for index in range(len(prompts))] for name in ("cold", "cached")]
    np.testing.assert_allclose(np.stack(second), np.stack(first), rtol=0, atol=bound)
    return np.stack(first)


@pytest.mark.real
@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_torch_runner(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.save(tmp_path).model
    prompts = prompts_of(VOCAB)
    actual = states_of(cpu.open(read_model(tmp_path), OPTIONS), prompts)
    np.testing.assert_allclose(actual, expected_states(model, prompts), rtol=0, atol=BOUND)


@pytest.mark.real_otherdevice
@pytest.mark.parametrize("tiny", [tiny for tiny in PLAIN if not tiny.label.startswith(REFUSED_BY_MLX)], ids=str)
def test_mlx_runner(tiny: Tiny, tmp_path: Path) -> None:
    mlx = _mlx()
    model = tiny.save(tmp_path).model
    prompts = prompts_of(VOCAB)
    actual = states_of(mlx.open(read_model(tmp_path), OPTIONS), prompts)
    np.testing.assert_allclose(actual, expected_states(model, prompts), rtol=0, atol=BOUND)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "headless"])
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "model", tied=request.param)


@pytest.mark.real
def test_model_saved_without_output_head(embedder: Path) -> None:
    """The names of its tensors have no prefix `model.`."""
    files = read_model(embedder)
    assert files.headless != json.loads((embedder / "config.json").read_text())["tie_word_embeddings"]
    assert files.config.tie_embeddings
    assert "embed_tokens.weight" in load_file(embedder / "model.safetensors")
    prompts = prompts_of(files.config.vocab_size)
    expected = expected_states(AutoModel.from_pretrained(embedder), prompts)
    np.testing.assert_allclose(states_of(cpu.open(files, OPTIONS), prompts), expected, rtol=0, atol=BOUND)


@pytest.mark.real_otherdevice
def test_model_saved_without_output_head_on_mlx(embedder: Path) -> None:
    files = read_model(embedder)
    prompts = prompts_of(files.config.vocab_size)
    expected = expected_states(AutoModel.from_pretrained(embedder), prompts)
    np.testing.assert_allclose(states_of(_mlx().open(files, OPTIONS), prompts), expected, rtol=0, atol=BOUND)


@pytest.mark.real
@pytest.mark.parametrize(("flash", "bound"), [(False, BOUND), (True, 2e-2)], ids=["exact", "flash"])
def test_gguf_file(flash: bool, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of llama.cpp would pool by itself if the file has a pooling type. Its flash attention rounds to 16
    bits, also with a cache in float32."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from localllm.backends import llamacpp
    from localllm.backends.llamacpp import opening
    from localllm.backends.llamacpp.attention import DISABLED

    from .gguf_models import write_embedder as write_gguf

    folder = write_embedder(tmp_path / "model")
    files = read_model(write_gguf(tmp_path / "embedder.gguf", folder))
    assert read_pooling(files) == Pooling(32)
    prompts = prompts_of(files.config.vocab_size)
    expected = expected_states(AutoModel.from_pretrained(folder), prompts)
    options = LoadOptions(context=256, max_rows=8, max_step_tokens=16, threads=1, cache_dtype="f32")
    if not flash:
        monkeypatch.setattr(opening, "flash_attention", lambda *_: DISABLED)
    actual = states_of(llamacpp.open(files, options), prompts, bound)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


def _mlx() -> object:
    pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA, float32 products keep 10 bits otherwise
    from localllm.backends import mlx

    return mlx
