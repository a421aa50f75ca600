"""Files that transformers loads in spite of odd tensors and names: logits of the cpu backend against transformers.

`change` gets the tensors of a saved model, and returns those that are written instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from localllm.backends import cpu
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import LoadOptions

from .batches import Row
from .checkpoints import CHECKPOINTS, fp8
from .checkpoints import Checkpoint as Quantised
from .test_config_parity import GEMMA, TIED, prompt_of, saved
from .test_parity import BOUND, logits_of, own_pages

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj"
BUDGET = LoadOptions(context=48, cache_bytes=2**21, max_rows=4, page_size=8, threads=1)


def prefixed(prefix: str, *starts: str) -> Change:
    return lambda tensors: {
        prefix + name if not starts or name.startswith(starts) else name: tensor for name, tensor in tensors.items()
    }


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def more(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: {**tensors, name: tensor}


def other_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBED].flip(0) * 0.5}


def same_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBED]}


def only_head(tensors: Tensors) -> Tensors:
    return {HEAD if name == EMBED else name: tensor for name, tensor in tensors.items()}


def doubles(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


# family, fields of its config, change, whether a warning names it
CASES: dict[str, tuple[str, dict[str, Any], Change, bool]] = {
    "prefix twice": ("llama", {}, prefixed("model.", "model."), False),
    "prefix of all names": ("llama", {}, prefixed("model."), False),
    "prefix of the head": ("llama", {}, prefixed("model.", HEAD), False),
    "no prefix": ("llama", {}, bare, False),
    "no prefix, tied": ("llama", TIED, bare, False),
    "prefix twice, experts": ("mixtral", {"num_local_experts": 3, "head_dim": 12}, prefixed("model.", "model."), False),
    "another head beside tied embeddings": ("llama", TIED, other_head, True),
    "the same head beside tied embeddings": ("llama", TIED, same_head, False),
    "another head, gemma": ("gemma3_text", GEMMA, other_head, True),
    "only the head, tied": ("llama", TIED, only_head, False),
    "float64": ("llama", {}, doubles, False),
    "float64, tied": ("qwen2", TIED, doubles, False),
    "a bias of zeros": ("llama", {}, more(f"{Q}.bias", torch.zeros(48)), False),
    "a bias of the head": ("llama", {}, more("lm_head.bias", torch.ones(131)), True),
    "a value head": ("llama", {}, more("v_head.summary.weight", torch.ones(1, 48)), True),
    "a vision tower": ("llama", {}, more("model.vision_tower.norm.weight", torch.ones(48)), True),
    "a mask": ("llama", {}, more("model.layers.1.self_attn.masked_bias", torch.ones(1)), True),
    "a scale of the cache": ("llama", {}, more(f"{Q[:-6]}k_proj.k_scale", torch.ones(1)), True),
    "integers of another part": ("llama", {}, more("codes", torch.ones(3, dtype=torch.uint8)), True),
    "a layer too many": ("llama", {}, more("model.layers.3.mlp.up_proj.weight", torch.ones(80, 48)), True),
}


def compare(files: ModelFiles, warns: bool) -> None:
    runner = cpu.open(files, BUDGET)
    assert isinstance(runner, TorchRunner)
    prompt = prompt_of()
    with torch.inference_mode():
        model, info = AutoModelForCausalLM.from_pretrained(
            files.path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        expected = model.eval()(torch.tensor([prompt])).logits[0]
    assert not info["missing_keys"]
    result = logits_of(runner, [Row(prompt, 0, own_pages(0))])
    torch.testing.assert_close(result, expected, rtol=0, atol=BOUND * max(1.0, expected.abs().max().item()))
    assert bool(runner.spec.warnings) == warns


@pytest.mark.real
@pytest.mark.parametrize("label", CASES)
def test_odd_tensors(label: str, tmp_path: Path) -> None:
    family, fields, change, warns = CASES[label]
    file = saved(tmp_path, family, fields, {}) / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file)
    compare(read_model(tmp_path), warns)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEXES: dict[str, tuple[dict[str, str | None], list[str]]] = {
    "lists a buffer": ({"model.layers.0.self_attn.rotary_emb.inv_freq": FIRST}, []),
    "lists a tensor of another part": ({"foo": SECOND}, []),
    "lacks a tensor": ({NORM: None}, []),
    "names another file": ({NORM: FIRST}, []),
    "two equal tensors": ({}, [NORM]),
    "a tensor in two files": ({}, [HEAD]),
}


@pytest.mark.real
@pytest.mark.parametrize("label", INDEXES)
def test_odd_indexes(label: str, tmp_path: Path) -> None:
    """`HEAD` in both files: the first has other values, and the last one counts."""
    changes, repeated = INDEXES[label]
    single = saved(tmp_path, "llama", {}, {}) / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    first = {name: tensor for name, tensor in tensors.items() if ".layers." in name}
    second = {name: tensor for name, tensor in tensors.items() if name not in first}
    first |= {name: tensors[name] * (3 if name == HEAD else 1) for name in repeated}
    save_file(first, tmp_path / FIRST)
    save_file(second, tmp_path / SECOND)
    weight_map: dict[str, str | None] = {**dict.fromkeys(first, FIRST), **dict.fromkeys(second, SECOND), **changes}
    listed = {name: file for name, file in weight_map.items() if file}
    index = {"metadata": {"total_size": 1}, "weight_map": listed}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    compare(read_model(tmp_path), warns=True)


MODELOPT_FP8 = Quantised(
    "modelopt-fp8",
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    fp8("weight_scale", lambda out_features, in_features: (1,)),
    more=lambda name, out_features: {"input_scale": torch.tensor(0.5)},
)
SIDE_FILES: dict[str, tuple[Quantised, str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "gptq": (CHECKPOINTS[0], "quantize_config.json", lambda table: table),
    "awq": (
        next(checkpoint for checkpoint in CHECKPOINTS if checkpoint.label == "awq"),
        "quant_config.json",
        lambda table: {"zero_point": True, "q_group_size": table["group_size"], "w_bit": 4, "version": "GEMM"},
    ),
    "modelopt": (MODELOPT_FP8, "hf_quant_config.json", lambda table: {"quantization": table}),
}


@pytest.mark.real
@pytest.mark.parametrize("label", SIDE_FILES)
def test_weight_format_in_a_side_file(label: str, tmp_path: Path) -> None:
    """transformers computes the same model in floats."""
    checkpoint, name, rewrite = SIDE_FILES[label]
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    file = tmp_path / "small" / "config.json"
    values = json.loads(file.read_text())
    table = values.pop("quantization_config")
    table.pop("quant_method")
    file.write_text(json.dumps(values))
    (tmp_path / "small" / name).write_text(json.dumps(rewrite(table)))
    runner = cpu.open(read_model(tmp_path / "small"), BUDGET)
    assert isinstance(runner, TorchRunner)
    prompt = prompt_of()
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "meant").eval()(torch.tensor([prompt])).logits[0]
    result = logits_of(runner, [Row(prompt, 0, own_pages(0))])
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-4 * expected.abs().max().item())
