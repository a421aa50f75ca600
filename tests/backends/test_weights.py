"""Weights that contradict config.json: the error names the file, the tensor, and the expected and the actual value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.backends import cpu
from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.loading import Loader
from localllm.backends.pytorch.models import llama
from localllm.backends.pytorch.opening import open_runner
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops

from .tiny import TINIES, VOCAB

BY_LABEL = {tiny.label: tiny for tiny in TINIES}
BUDGET = LoadOptions(cache_bytes=2**21, max_rows=4, threads=1)
NORM = "model.layers.1.input_layernorm.weight"

Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, label: str, change: Callable[[Tensors], object]) -> Path:
    BY_LABEL[label].save(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return folder


def replaced(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def spoilt(name: str, number: float) -> Callable[[Tensors], object]:
    """The tensor with another last value."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = number

    return change


CASES: list[tuple[str, str, Callable[[Tensors], object], str]] = [
    ("a tensor missing", "llama", lambda t: t.pop(NORM), f"'{NORM}' is missing, expected [48]"),
    ("the head missing", "llama", lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
    ("the embedding missing", "llama", lambda t: t.pop("model.embed_tokens.weight"), "is missing, expected [131, 48]"),
    ("a bias missing", "qwen2", lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), "k_proj.bias' is missing"),
    ("a bias too many", "llama", replaced("model.layers.0.self_attn.q_proj.bias", torch.ones(48)), "q_proj.bias"),
    ("adapters mixed in", "llama", replaced("base_model.lora_A.weight", torch.zeros(2)), "not part of"),
    ("head norms too many", "llama", replaced("model.layers.0.self_attn.q_norm.weight", torch.ones(12)), "q_norm"),
    ("one row short", "llama", replaced("model.embed_tokens.weight", torch.zeros(VOCAB - 1, 48)), "not [130, 48]"),
    ("one row long", "llama", replaced("lm_head.weight", torch.zeros(VOCAB + 1, 48)), "not [132, 48]"),
    ("transposed", "llama", replaced("model.layers.0.mlp.down_proj.weight", torch.zeros(80, 48)), "not [80, 48]"),
    (
        "a dimension too many",
        "llama",
        replaced(NORM, torch.ones(1, 48)),
        "(config.json), not [1, 48]",
    ),
    ("a number", "llama", replaced(NORM, torch.tensor(1.0)), "not []"),
    ("fused weights short", "phi3", replaced("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(95, 48)), "[95"),
    ("integers", "llama", replaced(NORM, torch.ones(48, dtype=torch.int8)), "one of BF16, F16, F32, not I8"),
    ("8-bit floats", "llama", replaced(NORM, torch.ones(48).to(torch.float8_e4m3fn)), "not F8_E4M3"),
    ("NaN in a norm", "llama", spoilt(NORM, float("nan")), f"'{NORM}' has a NaN or an infinity"),
    (
        "an infinity in a bias",
        "qwen2",
        spoilt("model.layers.0.self_attn.k_proj.bias", float("inf")),
        "k_proj.bias' has",
    ),
    ("NaN in the embedding", "llama", spoilt("model.embed_tokens.weight", float("nan")), "embed_tokens.weight' has"),
    ("NaN in the head", "llama", spoilt("lm_head.weight", float("nan")), "'lm_head.weight' has a NaN"),
    (
        "NaN in a projection",
        "llama",
        spoilt("model.layers.1.mlp.up_proj.weight", float("nan")),
        "up_proj.weight' has",
    ),
    ("a short head", "llama-tied", replaced("lm_head.weight", torch.zeros(VOCAB - 1, 48)), "not [130, 48]"),
]


@pytest.mark.parametrize(("label", "change", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_weights_that_contradict_the_config_are_refused(
    label: str, change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    files = read_model(rewritten(tmp_path, label, change))
    with pytest.raises(ModelRefused) as refused:
        cpu.open(files, BUDGET)
    assert message in str(refused.value)


def test_derived_buffers_and_copies_of_tied_weights_are_accepted(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    cpu.open(read_model(rewritten(tmp_path, "llama-tied", change)), BUDGET).close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_floats_are_converted_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    path = rewritten(tmp_path, "llama", change)
    runner = cpu.open(read_model(path), LoadOptions(cache_bytes=2**21, max_rows=4, threads=1, dtype="float32"))
    stored = load_file(path / "model.safetensors")["lm_head.weight"]
    # The product with the identity matrix is the weight.
    product = runner.model.head(torch.eye(stored.shape[1]), runner.device.ops)
    assert torch.equal(product.T, stored.float())


def test_sharded_weights_may_be_in_any_file(tmp_path: Path) -> None:
    BY_LABEL["llama-sharded"].save(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    cpu.open(read_model(tmp_path), BUDGET).close()


@pytest.mark.parametrize("label", ["llama", "llama-tied", "qwen2"])
def test_bytes_are_counted_as_in_memory(label: str, tmp_path: Path) -> None:
    """A token reads one row of the embedding. A tied head whose packed form is the embedding shares its memory."""
    BY_LABEL[label].save(tmp_path)
    files = read_model(tmp_path)
    spec = open_runner(files, BUDGET, replace(DEVICE, ops=Ops()), 2**30).spec
    embedding = files.tensors["model.embed_tokens.weight"].num_bytes
    assert spec.weight_bytes == files.weight_bytes
    assert spec.token_bytes == spec.weight_bytes - (0 if files.config.tie_embeddings else embedding)


@pytest.mark.parametrize(
    ("stored", "quant", "is_shared"),
    [(torch.float32, "none", True), (torch.float32, "int8", False), (torch.float16, "none", False)],
)
def test_tied_head_shares_the_memory_of_the_embedding(
    stored: torch.dtype, quant: Quant, is_shared: bool, tmp_path: Path
) -> None:
    """A quantised head has other values, and float16 is converted: then the embedding has memory of its own."""
    BY_LABEL["llama-tied"].save(tmp_path, stored)
    files = read_model(tmp_path)
    loader = Loader(files, replace(BUDGET, quant=quant), replace(DEVICE, ops=Ops()), torch.float32)
    model, loaded = loader.load(lambda weights: llama.build(weights, files.config, 16), 0)
    assert (model.head.weight is model.embedding) == is_shared
    assert loaded.bytes == pytest.approx(loader.expected_bytes(), rel=0.05)
    assert loaded.token_bytes == pytest.approx(loader.expected_token_bytes(), rel=0.1)


class TestBudget:
    """The size of a runner, and options that it refuses."""

    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, tmp_path_factory: pytest.TempPathFactory):
        folder = tmp_path_factory.mktemp("model")
        BY_LABEL["llama"].save(folder)
        return read_model(folder, "tiny")

    def test_default_cache_fits_a_context_and_some_tokens_per_row(self, files) -> None:
        spec = cpu.open(files, LoadOptions(max_rows=8, threads=1)).spec
        assert spec.max_context == 128
        assert spec.cache_tokens == 8 * 128
        assert (spec.vocab_size, spec.max_rows, spec.groups[0].page_size, spec.overlap) == (VOCAB, 8, 16, False)

    def test_cache_is_sized_by_bytes(self, files) -> None:
        page = 2 * 16 * 2 * 12 * 3 * 4
        spec = cpu.open(files, LoadOptions(cache_bytes=page * 5 + page - 1, threads=1)).spec
        assert spec.groups[0].num_pages == 5
        assert spec.max_context == 80, "the model's 128 do not fit"

    @pytest.mark.parametrize(
        ("budget", "message"),
        [
            (LoadOptions(context=129), "has a context of 128 tokens, not 129"),
            (LoadOptions(context=0), "not 0"),
            (LoadOptions(context=128, cache_bytes=10_000), "a context of 128 tokens needs"),
            (LoadOptions(cache_bytes=100), "needs"),
        ],
    )
    def test_cache_that_does_not_fit_is_refused_with_both_numbers(
        self, files, budget: LoadOptions, message: str
    ) -> None:
        with pytest.raises(ModelRefused, match=message) as refused:
            cpu.open(files, budget)
        assert "tiny" in str(refused.value)

    def test_weights_beyond_the_free_memory_are_refused(self, files) -> None:
        from localllm.backends.cpu.device import open_on_cpu

        with pytest.raises(ModelRefused, match=r"needs 0\.26 MiB for its weights, but only 0\.00 MiB is free"):
            open_on_cpu(files, LoadOptions(threads=1), free=1000)
