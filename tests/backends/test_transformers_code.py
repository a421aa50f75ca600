"""Models that transformers' own code computes over our cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm import backends
from localllm.backends import cpu
from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch import architecture, transformers_code
from localllm.backends.pytorch.opening import open_runner
from localllm.engine.errors import ModelRefused, SettingRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner
from localllm.kernels.ops import Ops

from . import canary
from .adapters import check_adapter
from .checkpoints import CHECKPOINTS, Checkpoint
from .conformance import BUDGET, Conformance
from .tape import Tape
from .teacher import difference, expected
from .test_checkpoints import logits
from .tiny import Tiny

OPTIONS = LoadOptions(context=64, max_rows=4, page_size=8, dtype="float32")
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
STABLE = Tiny("stablelm", "stablelm", {"use_qkv_bias": True, "rope_parameters": ROPE})
SAMPLES = (
    STABLE,
    Tiny("phimoe", "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Tiny("starcoder2", "starcoder2", {"sliding_window": 6, "num_key_value_heads": 1}),
    Tiny("gpt2", "gpt2", {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128}),
)
FORMATS = ("gptq", "gptq-order", "awq", "fp8", "compressed-int4", "compressed-int8")


@pytest.fixture(scope="class")
def forced() -> Iterator[None]:
    """All models run through transformers' code, also those with a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "is_native", lambda model_type: False)
        yield


class TestConformance(Conformance):
    backend = "cpu"
    same_bits = False

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, forced: None, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        folder = canary.save(tmp_path_factory.mktemp("canary"))
        return backends.load(cls.backend).open(read_model(folder), BUDGET)


@pytest.mark.parametrize("shape", SAMPLES, ids=str)
def test_logits_are_those_of_transformers(shape: Tiny, tmp_path: Path) -> None:
    right = expected(shape, tmp_path)
    runner = cpu.open(read_model(tmp_path), OPTIONS)
    assert any("transformers' code" in warning for warning in runner.spec.warnings)
    errors, _ = difference(runner, shape, right)
    assert errors.abs().max() < 1e-4


def test_captured_steps_are_those_of_transformers(tmp_path: Path) -> None:
    right = expected(STABLE, tmp_path)
    device = replace(DEVICE, ops=Ops(), recorder=Tape, graphs="breakable")
    runner = open_runner(read_model(tmp_path), OPTIONS, device, 2**30)
    assert runner.spec.graph_rows
    assert runner.spec.graph_tokens
    errors, _ = difference(runner, STABLE, right)
    assert errors.abs().max() < 1e-4
    with pytest.raises(SettingRefused, match="graphs split is not supported by transformers' code"):
        open_runner(read_model(tmp_path), replace(OPTIONS, graphs="split"), device, 2**30)


# PEFT reads properties that transformers deprecates.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adapter_has_the_effect_of_peft(tmp_path: Path) -> None:
    check_adapter(STABLE, ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"), tmp_path)


@pytest.mark.parametrize("checkpoint", [each for each in CHECKPOINTS if each.label in FORMATS], ids=str)
def test_quantised_weights_are_those_of_our_page(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    ours, right = logits(tmp_path / "small")
    monkeypatch.setattr(architecture, "is_native", lambda model_type: False)
    theirs, result = logits(tmp_path / "small")
    assert theirs.spec.quant == ours.spec.quant
    torch.testing.assert_close(result, right, rtol=0.0, atol=2e-4 * right.abs().max().item())


def test_weights_are_quantised_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Tiny("llama", "llama")
    right = expected(shape, tmp_path)
    options = replace(OPTIONS, quant="int8")
    ours = cpu.open(read_model(tmp_path), options)
    monkeypatch.setattr(architecture, "is_native", lambda model_type: False)
    theirs = cpu.open(read_model(tmp_path), options)
    assert theirs.spec.weight_bytes == pytest.approx(ours.spec.weight_bytes, rel=0.01)
    both = [difference(runner, shape, right)[0] for runner in (ours, theirs)]
    assert both[1].abs().max() < 1.5 * both[0].abs().max() + 1e-3


def test_a_tensor_that_the_class_lacks_is_refused(tmp_path: Path) -> None:
    STABLE.save(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.extra.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ModelRefused, match="tensors are not part of stablelm"):
        cpu.open(read_model(tmp_path), OPTIONS)


def test_a_rope_that_depends_on_the_step_is_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    replace(STABLE, more={"rope_parameters": {**dynamic, "partial_rotary_factor": 0.5}}).save(tmp_path)
    with pytest.raises(ModelRefused, match="a rope of the type dynamic depends on the longest row"):
        cpu.open(read_model(tmp_path), OPTIONS)


def test_matrices_that_stay_floats_are_named(tmp_path: Path) -> None:
    SAMPLES[-1].save(tmp_path)
    runner = cpu.open(read_model(tmp_path), replace(OPTIONS, quant="int8"))
    assert any("h.0.attn.c_attn.weight' and 11 more: not quantised" in warning for warning in runner.spec.warnings)


def test_a_missing_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    STABLE.save(tmp_path)
    assert cpu.accepts(read_model(tmp_path)) == ""
    monkeypatch.setattr(transformers_code, "find_spec", lambda name: None)
    assert "pip install 'localllm[transformers]'" in cpu.accepts(read_model(tmp_path))
