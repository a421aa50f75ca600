"""Opening a model: the options of the runner, and the ModelInfo."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.app.frames import Load
from localllm.app.worker import opening
from localllm.backends import shared_settings
from localllm.engine.files.adapter_base import check_base
from localllm.engine.files.adapter_files import AdapterFiles
from localllm.engine.options import LoadOptions
from localllm.engine.runner import RunnerSpec

from ..tiny_qwen import write_tokenizer

SPEC = RunnerSpec(
    vocab_size=11,
    max_tokens=64,
    max_rows=8,
    max_context=13,
    num_states=3,
    dtype="float32",
    quant="int8",
    weight_bytes=17,
    token_bytes=19,
    cache_bytes=23,
    step_seconds=29.0,
    warnings=("slow",),
)


def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: LoadOptions = LoadOptions()
) -> tuple[opening.OpenModel, LoadOptions, list[Any]]:
    received: list[LoadOptions] = []

    def open_(_: object, options: LoadOptions) -> object:
        received.append(options)
        return SimpleNamespace(spec=SPEC)

    files = SimpleNamespace(
        path=write_tokenizer(folder),
        gguf=(),
        eos_ids=[2],
        weight_bytes=40e6,
        config=SimpleNamespace(model_type="qwen3"),
        generation={"top_k": 20},
        suppressed=(3,),
        headless=False,
    )
    choice = SimpleNamespace(
        backend=SimpleNamespace(name="b", open=open_), info=SimpleNamespace(name="d"), reason="the first that works"
    )
    calls: list[Any] = []
    monkeypatch.setattr(opening, "read_model", lambda *arguments: calls.append(arguments) or files)  # type: ignore[func-returns-value]
    monkeypatch.setattr(shared_settings, "choose", lambda *arguments: calls.append(arguments) or choice)  # type: ignore[func-returns-value]
    stages: list[Any] = []
    load = Load(model="m", path="x", backend="cpu", options=options)
    model = opening.open_model(load, lambda *stage: stages.append(stage))
    model.close()
    assert calls == [(Path("x"), "m"), ("cpu", files)]
    return model, received[0], stages


def test_options_reach_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoadOptions(context=5, quant="int4", packed_dir=tmp_path)
    assert opened(tmp_path, monkeypatch, options)[1] is options


def test_model_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, stages = opened(tmp_path, monkeypatch)
    info = model.info
    assert (info.model, info.backend, info.device) == ("m", "b", "d")
    assert (info.dtype, info.quant, info.reason, info.warnings) == (
        "float32",
        "int8",
        "the first that works",
        ("slow",),
    )
    assert (info.vocab, info.context, info.weight_bytes, info.token_bytes) == (11, 13, 17, 19)
    assert (info.cache_bytes, info.cache_tokens, info.step_seconds) == (23, 39, 29.0)
    assert model.recommended == {"top_k": 20}
    assert model.suppressed == (3,)
    assert model.tokenizer.eos_ids == {2}
    assert [more for _, _, more in stages] == [0, 0, 2.0, 0], "seconds at the lowest rate"
    assert [done for _, done, _ in stages] == sorted(done for _, done, _ in stages)
    assert stages[-1][1] == 1.0


def test_close_ends_the_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(tmp_path, monkeypatch)[0]
    assert model.renderer.render("a", {}) == "a"
    child = model.renderer._child._child
    assert child is not None
    grammars = SimpleNamespace(closed=0)
    grammars.close = lambda: setattr(grammars, "closed", 1)
    model._grammars = grammars
    model.close()
    assert child.returncode is not None
    assert grammars.closed


@pytest.mark.parametrize(
    ("gguf", "kind", "expected"), [(True, "llama", ""), (True, "qwen3", "qwen3"), (False, "llama", "llama")]
)
def test_architecture_of_several_families_says_nothing_about_an_adapter(gguf: bool, kind: str, expected: str) -> None:
    """An adapter of Mistral fits a GGUF file of Mistral, whose architecture is that of Llama."""
    files: Any = SimpleNamespace(gguf=(Path("a.gguf"),) if gguf else (), config=SimpleNamespace(model_type=kind))
    assert opening._model_type(files) == expected
    adapter = AdapterFiles(Path("a"), {}, "mistralai/Mistral-7B-v0.1", "MistralForCausalLM", "v")
    if not expected:
        assert check_base(adapter, "/models/renamed.gguf", opening._model_type(files)) == ""
