"""Experts in a model's files: their names and layouts, their formats, their memory, and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from operator import setitem
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from localllm.backends.cpu.device import DEVICE, open_on_cpu
from localllm.backends.pytorch import loading, memory_plan
from localllm.backends.pytorch.device import Meter
from localllm.backends.pytorch.opening import open_runner, plan_memory
from localllm.backends.pytorch.packed import PackedFile
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops

from .adapters import OPTIONS, adapter_of, check_adapter, open_on, save_adapter
from .batches import Row, make_batch
from .checkpoints import CHECKPOINTS, Checkpoint, Tensors, save_mxfp4
from .tiny import TINIES, VOCAB

BUDGET = LoadOptions(cache_bytes=2**20, max_rows=4, threads=1, dtype="float32")
FREE = 2**30
QUANTS: tuple[Quant, ...] = ("none", "int8", "int4", "fp8")
BY_LABEL = {tiny.label: tiny for tiny in TINIES}
EXPERTS = "model.layers.1.mlp.experts"


def logits(runner: TorchRunner) -> torch.Tensor:
    ops = runner.device.ops
    with torch.inference_mode():
        batch = make_batch([Row([5, 9, 77, 3, 20, 101], 0, [1])], VOCAB, groups=len(runner.spec.groups))
        step = runner.inputs.send(batch).step
        every = replace(step, last=torch.arange(6, dtype=torch.int32))
        return runner.model.logits(runner.model(every, ops, runner.kv), ops)


def opened(folder: Path, **more: object) -> TorchRunner:
    return open_on_cpu(read_model(folder), replace(BUDGET, **more), FREE)


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def stack(tensors: Tensors) -> None:
    """The tensors as transformers 5 has them in memory: all experts in one tensor."""
    layers = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for layer in layers:
        name = f"{layer}.experts"
        count = sum(1 for one in tensors if one.startswith(f"{name}.") and one.endswith("down_proj.weight"))

        def popped(projection: str, name: str = name, count: int = count) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{name}.{expert}.{projection}.weight") for expert in range(count)])

        tensors[f"{name}.gate_up_proj"] = torch.cat([popped("gate_proj"), popped("up_proj")], 1)
        tensors[f"{name}.down_proj"] = popped("down_proj")


def rename(tensors: Tensors) -> None:
    """The names of Mixtral in transformers 5."""
    for name in list(tensors):
        renamed = name.replace("block_sparse_moe", "mlp")
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            renamed = renamed.replace(f".{old}.", f".{new}.")
        tensors[renamed] = tensors.pop(name)


@pytest.mark.real
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("label", ["qwen3_moe-dense-layer", "glm4_moe", "mixtral"])
def test_stacked_experts_equal_experts_in_single_tensors(label: str, quant: Quant, tmp_path: Path) -> None:
    BY_LABEL[label].save(tmp_path)
    single = opened(tmp_path, quant=quant)
    if label == "mixtral":
        rewrite(tmp_path, rename)
        assert torch.equal(logits(single), logits(opened(tmp_path, quant=quant)))
    rewrite(tmp_path, stack)
    stacked = opened(tmp_path, quant=quant)
    assert torch.equal(logits(single), logits(stacked))
    assert single.spec.weight_bytes == stacked.spec.weight_bytes


def remove(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def put_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


def wrong_stack(tensors: Tensors) -> None:
    stack(tensors)
    tensors[f"{EXPERTS}.gate_up_proj"] = tensors[f"{EXPERTS}.gate_up_proj"].transpose(1, 2).contiguous()


def half_stack(tensors: Tensors) -> None:
    stack(tensors)
    tensors.pop(f"{EXPERTS}.down_proj")


REFUSED = {
    "missing": (remove(f"{EXPERTS}.3.up_proj.weight"), r"experts\.3\.up_proj\.weight' is missing"),
    "router": (remove("model.layers.1.mlp.gate.weight"), r"mlp\.gate\.weight' is missing"),
    "seventh": (put_tensor(f"{EXPERTS}.6.up_proj.weight", torch.zeros(40, 48)), "not part of qwen3_moe, the first is"),
    "shape": (put_tensor(f"{EXPERTS}.2.up_proj.weight", torch.zeros(48, 40)), r"must be \[40, 48\]"),
    "nan": (put_tensor(f"{EXPERTS}.2.up_proj.weight", torch.full((40, 48), torch.nan)), "has a NaN"),
    "dtype": (put_tensor(f"{EXPERTS}.4.up_proj.weight", torch.zeros(40, 48).half()), "another weight format than"),
    "transposed": (wrong_stack, r"gate_up_proj' must be \[6, 80, 48\]"),
    "half": (half_stack, r"experts\.0\.down_proj\.weight' is missing"),
}


@pytest.mark.parametrize("label", REFUSED)
def test_wrong_experts_are_refused_by_name(label: str, tmp_path: Path) -> None:
    change, message = REFUSED[label]
    BY_LABEL["qwen3_moe"].save(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelRefused, match=message):
        opened(tmp_path)


def test_layer_that_predicts_several_tokens_is_ignored(tmp_path: Path) -> None:
    """GLM has one such layer, after the last one."""
    BY_LABEL["glm4_moe"].save(tmp_path)
    expected = logits(opened(tmp_path))
    rewrite(tmp_path, put_tensor("model.layers.3.eh_proj.weight", torch.zeros(4, 4)))
    assert torch.equal(logits(opened(tmp_path)), expected)
    assert not read_model(tmp_path).warnings
    rewrite(tmp_path, put_tensor("model.layers.30.eh_proj.weight", torch.zeros(4, 4)))
    assert "'model.layers.30.eh_proj.weight': not used" in read_model(tmp_path).warnings[0]


def test_fit_does_not_count_the_layer_that_predicts_several_tokens(tmp_path: Path) -> None:
    BY_LABEL["glm4_moe"].save(tmp_path)
    files = read_model(tmp_path)
    plan = plan_memory(files, BUDGET, DEVICE, FREE)
    layers = files.config.num_layers
    more = {f"model.layers.{layers}.mlp.experts.{expert}.up_proj.weight": torch.zeros(512, 512) for expert in range(4)}
    rewrite(tmp_path, lambda tensors: tensors.update(more))
    assert plan_memory(read_model(tmp_path), BUDGET, DEVICE, FREE) == plan
    assert read_model(tmp_path).weight_bytes == files.weight_bytes


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("num_experts", 2, "numbers 0 to 7 .* but the files have 6, up to 5"),
        ("num_experts", -2, "numbers 0 to 3 .* but the files have 6, up to 5"),
        ("moe_intermediate_size", 8, r"experts\.0\.down_proj\.weight' must be \[48, 48\] .* not \[48, 40\]"),
    ],
)
def test_fit_refuses_experts_that_differ_from_the_configuration(
    field: str, change: int, message: str, is_stacked: bool, tmp_path: Path
) -> None:
    BY_LABEL["qwen3_moe"].save(tmp_path)
    if is_stacked:
        rewrite(tmp_path, stack)
        message = r"down_proj' must be \[\d, \d+, \d+\] or .*, not \[6, 48, 40\]"
    plan_memory(read_model(tmp_path), BUDGET, DEVICE, FREE)
    config = json.loads((tmp_path / "config.json").read_text())
    name = next(name for name in (field, "num_local_experts") if name in config)
    (tmp_path / "config.json").write_text(json.dumps(config | {name: config[name] + change}))
    with pytest.raises(ModelRefused, match=message):
        plan_memory(read_model(tmp_path), BUDGET, DEVICE, FREE)


def test_fit_refuses_mxfp4_experts_that_differ_from_the_configuration(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "small", tmp_path / "meant")
    for folder, end in (("small", "_blocks"), ("meant", "")):
        plan_memory(read_model(tmp_path / folder), BUDGET, DEVICE, FREE)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
        with pytest.raises(ModelRefused, match=rf"experts\.down_proj{end}' must be \[4, 64, "):
            plan_memory(read_model(tmp_path / folder), BUDGET, DEVICE, FREE)


def test_workspace_has_room_for_the_experts_that_a_product_converts(tmp_path: Path) -> None:
    BY_LABEL["qwen3_moe"].save(tmp_path)
    config = read_model(tmp_path).config
    device = replace(DEVICE, meter=Meter(lambda: 0, lambda: None, libraries=0, graph=0))
    plain, quantised = (
        memory_plan.expected_workspace(config, replace(BUDGET, quant=quant), torch.float32, device)
        for quant in ("none", "fp8")
    )
    assert config.moe is not None
    assert quantised - plain == config.moe.experts * 2 * config.moe.inner_size * config.hidden_size * 4
    pytest.importorskip("triton")
    from localllm.kernels.gpu.widened_product import MAX_CHUNK

    assert memory_plan.MAX_CONVERTED == MAX_CHUNK


@pytest.mark.real
def test_mxfp4_experts_equal_their_float_values(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "small", tmp_path / "meant")
    small, meant = opened(tmp_path / "small"), opened(tmp_path / "meant")
    result, expected = logits(small), logits(meant)
    assert expected.std() > 0.5
    torch.testing.assert_close(result, expected, rtol=0.0, atol=1e-4)
    assert small.spec.quant == "mxfp4"
    device = replace(DEVICE, ops=Ops())
    files = read_model(tmp_path / "small")
    spec = open_runner(files, BUDGET, device, FREE).spec
    loader = loading.Loader(files, BUDGET, device, torch.float32)
    assert loader.expected_bytes() == pytest.approx(spec.weight_bytes, rel=0.01)
    assert loader.expected_token_bytes() == pytest.approx(spec.token_bytes, rel=0.03)


def test_scale_of_mxfp4_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "small", tmp_path / "meant")
    rewrite(tmp_path / "small", lambda tensors: setitem(tensors[f"{EXPERTS}.down_proj_scales"], (2, 3, 1), 255))
    with pytest.raises(ModelRefused, match=r"experts\.2\.down_proj\.scales' has a NaN"):
        opened(tmp_path / "small")


@pytest.mark.real
@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_quantised_experts_are_near_the_float_experts(quant: Quant, tmp_path: Path) -> None:
    BY_LABEL["qwen3_moe"].save(tmp_path)
    plain, small = opened(tmp_path), opened(tmp_path, quant=quant)
    near = torch.cosine_similarity(logits(plain).flatten(), logits(small).flatten(), dim=0)
    assert near > {"int8": 0.98, "int4": 0.5, "fp8": 0.95}[quant]
    assert small.spec.weight_bytes < plain.spec.weight_bytes


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_router_is_not_quantised(quant: Quant, tmp_path: Path) -> None:
    BY_LABEL["qwen3_moe"].save(tmp_path)
    device = replace(DEVICE, ops=Ops())
    runner = open_runner(read_model(tmp_path), replace(BUDGET, quant=quant), device, FREE)
    assert isinstance(runner, TorchRunner)
    mlp = runner.model.layers[1].prepared.mlp
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.weight"]
    assert torch.equal(mlp.router.product.weight, stored)
    assert mlp.weights.op == quant


@pytest.mark.parametrize("label", ["gptq", "awq", "compressed-int4", "compressed-int8", "fp8-blocks"])
def test_quantised_checkpoint_equals_its_float_model(label: str, tmp_path: Path) -> None:
    checkpoint = replace(by_label(label), model="qwen3_moe")
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    result, expected = logits(opened(tmp_path / "small")), logits(opened(tmp_path / "meant"))
    if checkpoint.exact:
        torch.testing.assert_close(result, expected, rtol=0.0, atol=2e-4 * expected.abs().max().item())
    else:
        assert torch.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.98


def by_label(label: str) -> Checkpoint:
    return next(checkpoint for checkpoint in CHECKPOINTS if checkpoint.label == label)


def test_permuted_inputs_are_refused_by_name(tmp_path: Path) -> None:
    replace(by_label("gptq-same-order"), model="qwen3_moe").save(tmp_path / "small", tmp_path / "meant")
    with pytest.raises(ModelRefused, match=r"experts\.0\.gate_proj has permuted inputs \(desc_act\)"):
        opened(tmp_path / "small")


@pytest.mark.real
@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_second_load_reads_experts_from_the_packed_file(
    quant: Quant, stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MIN_PACKED_BYTES", 0)
    BY_LABEL["qwen3_moe"].save(tmp_path / "model")
    if stacked:
        rewrite(tmp_path / "model", stack)
    first = opened(tmp_path / "model", quant=quant, packed_dir=tmp_path / "packed")
    written = []
    monkeypatch.setattr(PackedFile, "write", lambda self, products: written.append(products))
    monkeypatch.setattr("localllm.backends.pytorch.weights.slices", lambda loaded: only_floats(loaded))
    second = opened(tmp_path / "model", quant=quant, packed_dir=tmp_path / "packed")
    assert torch.equal(logits(first), logits(second))
    assert (first.spec.weight_bytes, first.spec.token_bytes) == (second.spec.weight_bytes, second.spec.token_bytes)
    assert not written


def only_floats(loaded: list) -> list:
    """The slices of a weight that is not quantised, such as a router."""
    from localllm.backends.pytorch.quant import slices

    assert {one.product for one in loaded} == {"dense"}
    return list(slices(loaded))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_expected_bytes_are_near_the_loaded_bytes(quant: Quant, stacked: bool, tmp_path: Path) -> None:
    """A token reads 2 of 6 experts."""
    BY_LABEL["qwen3_moe"].save(tmp_path)
    if stacked:
        rewrite(tmp_path, stack)
    files = read_model(tmp_path)
    device = replace(DEVICE, ops=Ops())
    spec = open_runner(files, replace(BUDGET, quant=quant), device, FREE).spec
    loader = loading.Loader(files, replace(BUDGET, quant=quant), device, torch.float32)
    assert loader.expected_bytes() == pytest.approx(spec.weight_bytes, rel=0.01 if quant == "none" else 0.1)
    assert loader.expected_token_bytes() == pytest.approx(spec.token_bytes, rel=0.01 if quant == "none" else 0.1)
    embedding = files.tensors["model.embed_tokens.weight"].num_bytes
    if quant == "none":
        experts = sum(tensor.num_bytes for name, tensor in files.tensors.items() if ".experts." in name)
        assert spec.token_bytes == spec.weight_bytes - embedding - experts * 4 // 6


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapter_of_attention_equals_peft(tmp_path: Path) -> None:
    check_adapter(BY_LABEL["qwen3_moe"], ["q_proj", "k_proj", "v_proj", "o_proj"], tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("module", ["mlp.experts.2.up_proj", "mlp.experts", "mlp.experts.base_layer"])
def test_adapter_of_experts_is_refused_by_name(module: str, tmp_path: Path) -> None:
    tiny = BY_LABEL["qwen3_moe"]
    tiny.save(tmp_path / "model")
    folder = tmp_path / "adapter"
    save_adapter(tiny.save(tmp_path / "copy"), LoraConfig(r=4, target_modules=["q_proj"]), folder, 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    for factor, shape in (("A", (4, 48)), ("B", (40, 4))):
        tensors[f"base_model.model.model.layers.1.{module}.lora_{factor}.weight"] = torch.zeros(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"target_modules": ["q_proj", module.rpartition(".")[2]]})
    )
    runner = open_on("cpu", tmp_path / "model", OPTIONS)
    with pytest.raises(ModelRefused, match="adapters of the experts of a mixture are not supported"):
        runner.prepare_adapter(adapter_of(folder))
