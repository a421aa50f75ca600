"""Adapters and quantised weights of the architectures in pages.py. test_parity.py compares their logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel

from .adapters import (
    LINEAR,
    OPTIONS,
    adapter_of,
    assert_equal,
    log_probabilities,
    open_on,
    pages,
    put,
    run,
    save_adapter,
)
from .batches import Row
from .checkpoints import CHECKPOINTS
from .pages import PAGES
from .tiny import Tiny

# PEFT reads properties that transformers deprecates, and warns about tied embeddings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
PROMPT = list(range(5, 25))
# The projections of one architecture are ignored by another. PEFT reads those of the MLP as experts if there are any.
MLP = (*LINEAR[4:], "gate_up_proj", "input_linear", "output_linear")
TARGETS = [
    *LINEAR[:4],
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
]
TOWERS = r".*\.(vision_tower|visual)\..*"
SAMPLED = ("gemma4_text-shared", "granitemoehybrid")
QUANTISED = (
    *("olmo3", "cohere2", "granitemoehybrid", "exaone4", "hunyuan_v1_dense", "glm", "seed_oss"),
    "gemma4_text-shared",
)
BOUNDS = {"int8": 0.75, "int4": 0.15}  # rounded weights of a random model choose other experts
PARAMETERS = [
    pytest.param(page, marks=() if page.label in SAMPLED else pytest.mark.slow)
    for page in PAGES
    if "-" not in page.label or page.label in SAMPLED
]


@pytest.mark.parametrize("page", PARAMETERS, ids=str)
def test_adapter_equals_peft(page: Tiny, tmp_path: Path) -> None:
    base = page.save(tmp_path / "base")
    has_experts = any(".experts." in name for name, _ in base.named_parameters())
    targets = TARGETS if has_experts else [*TARGETS, *MLP]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, exclude_modules=TOWERS)
    save_adapter(base, config, tmp_path / "adapter", 1)
    expected = log_probabilities(PeftModel.from_pretrained(base, tmp_path / "adapter"), PROMPT)[-1:]
    runner = open_on("cpu", tmp_path / "base")
    put(runner, 1, adapter_of(tmp_path / "adapter"))
    assert_equal(run(runner, [Row(PROMPT, 0, pages(0))], [1]), expected)


@pytest.mark.parametrize("quant", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", PARAMETERS, ids=str)
def test_quantised_weights_are_near_the_floats(page: Tiny, quant: str, tmp_path: Path) -> None:
    expected = log_probabilities(page.save(tmp_path), PROMPT)[-1:]
    runner = open_on("cpu", tmp_path, replace(OPTIONS, quant=quant, adapter_slots=0))
    actual = run(runner, [Row(PROMPT, 0, pages(0))], [0])
    centred = [logits - logits.mean() for logits in (actual, expected)]
    assert runner.spec.quant == quant
    assert torch.cosine_similarity(*centred).item() > BOUNDS[quant]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["gptq", "awq", "compressed-int4", "fp8-blocks"])
@pytest.mark.parametrize("page", [page for page in PAGES if page.label in QUANTISED], ids=str)
def test_quantised_checkpoint_equals_its_float_model(
    page: Tiny, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.backends.checkpoints.TINIES", [page])
    checkpoint = next(replace(one, model=page.label) for one in CHECKPOINTS if one.label == label)
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    options = replace(OPTIONS, adapter_slots=0)
    result, expected = [
        run(open_on("cpu", tmp_path / name, options), [Row(PROMPT, 0, pages(0))], [0]) for name in ("small", "meant")
    ]
    torch.testing.assert_close(result, expected, rtol=0, atol=5e-3)
