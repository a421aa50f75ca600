"""Loading on MLX: formats of weights, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

from localllm.backends import cpu, mlx
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model

from .conformance import Conversation
from .mlx_models import DENSE, EXPERTS, SMALL, Loaded, plain_model, quantised, rewrite

pytestmark = pytest.mark.real_otherdevice

FORMATS: dict[str, dict[str, Any]] = {
    "4-bit": {"group_size": 32, "bits": 4},
    "8-bit": {"group_size": 32, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


@pytest.mark.parametrize("format_name", FORMATS)
def test_quantised_checkpoint_equals_mlx_lm(tmp_path: Path, format_name: str) -> None:
    tiny = replace(DENSE, more={**DENSE.more, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32})
    tiny.save(tmp_path)
    quantised(tmp_path, **FORMATS[format_name])
    files = read_model(tmp_path)
    assert cpu.accepts(files) == "its weights are in MLX's format"
    loaded = Loaded(mlx.open(files, replace(SMALL, dtype="auto")), plain_model(tmp_path))
    assert loaded.runner.spec.quant == f"mlx {format_name}"
    talk, prompts = Conversation(loaded.runner), [[5, 9, 77, 30], [8, 100, 3]]
    for index, prompt in enumerate(prompts):
        talk.submit(str(index), prompt, 10)
    assert talk.finish() == {str(index): loaded.plain(prompt, 10) for index, prompt in enumerate(prompts)}


# Input features of a projection, two groups of weights that share a scale. With one group, which no real model has,
# MLX 0.32 compiles another kernel on Hopper for two minutes, and its float32 results differ.
WIDE = 128


@pytest.mark.parametrize(("quant", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_are_quantised_while_loading(tmp_path: Path, quant: Any, bits: int) -> None:
    tiny = replace(DENSE, more={**DENSE.more, "hidden_size": WIDE, "intermediate_size": WIDE, "head_dim": 32})
    tiny.save(tmp_path / "plain")
    tiny.save(tmp_path / "localllm")
    quantised(tmp_path / "plain", group_size=64, bits=bits)
    runner = mlx.open(read_model(tmp_path / "localllm"), replace(SMALL, quant=quant))
    assert runner.spec.quant == quant
    talk, prompt = (
        Conversation(runner),
        [5, 9, 77, 59],
    )  # each token leads by 0.17 or more, which exceeds the rounding of CUDA's products
    talk.submit("a", prompt, 10)
    plain = Loaded(runner, plain_model(tmp_path / "plain"))
    assert talk.finish() == {"a": plain.plain(prompt, 10)}


def test_checkpoint_with_code_is_refused(tmp_path: Path) -> None:
    DENSE.save(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    rewrite(tmp_path, lambda config: config.update(model_file="own.py"))
    with pytest.raises(ModelRefused, match="contains code"):
        mlx.open(read_model(tmp_path), SMALL)


@pytest.mark.parametrize("broken", ["no packed weights", "torn weights"])
def test_checkpoint_that_mlx_lm_cannot_load_is_refused(tmp_path: Path, broken: str) -> None:
    DENSE.save(tmp_path)
    files = read_model(tmp_path)
    if broken == "torn weights":  # after read_model checked them
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        rewrite(tmp_path, lambda config: config.update(quantization_config={"quant_method": "awq", "bits": 4}))
    with pytest.raises(ModelRefused, match=r"cannot be loaded by mlx-lm|model\.safetensors"):
        mlx.open(files, SMALL)


@pytest.mark.parametrize("leaves", [SystemExit(1), ModuleNotFoundError("No module named 'hf_olmo'")], ids=repr)
def test_architecture_that_needs_another_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: BaseException
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise leaves

    DENSE.save(tmp_path)
    monkeypatch.setattr("localllm.backends.mlx.loading.load_model", never)
    with pytest.raises(ModelRefused, match="needs another package"):
        mlx.open(read_model(tmp_path), SMALL)


def test_token_bytes_of_dense_models_and_experts(tmp_path: Path) -> None:
    DENSE.save(tmp_path / "dense")
    EXPERTS.save(tmp_path / "experts")
    spec = mlx.open(read_model(tmp_path / "dense"), SMALL).spec
    assert spec.weight_bytes - spec.token_bytes == 131 * 48 * 4, "of the embedding only one row is read"
    assert mlx.open(read_model(tmp_path / "experts"), SMALL).spec.token_bytes == 0
