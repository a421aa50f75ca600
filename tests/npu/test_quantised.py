"""Models with weights of every format, opened as a whole over the fake ACL: products, formats, packed file, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from localllm.backends.cpu.device import open_on_cpu
from localllm.backends.npu.device import device
from localllm.backends.npu.formats import NPUACLFormat, WeightFormats
from localllm.backends.npu.installation import start
from localllm.backends.pytorch import loading
from localllm.backends.pytorch.loading import Loader
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.batch import Want
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.kernels.ops.linear import weight_tensors

from ..backends import modelslim
from ..backends.batches import Row, make_batch
from ..backends.tiny import TINIES
from .op_cases import OpsOfTorchNpu

pytestmark = pytest.mark.emulated

OPTIONS = LoadOptions(cache_bytes=2**21, max_rows=4, threads=1, graphs="off")
FREE = 2**30
PRODUCTS = {
    "none": set[str](),
    "int8": {"npu_dynamic_quant", "npu_quant_matmul"},
    "int4": {"npu_weight_quant_batchmatmul"},
    "fp8": set[str](),
}
EXPERTS = {"npu_moe_gating_top_k_softmax", "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_finalize_routing"}


def files_of(label: str, folder: Path) -> ModelFiles:
    next(tiny for tiny in TINIES if tiny.label == label).save(folder)
    return read_model(folder)


def opened(files: ModelFiles, options: LoadOptions) -> TorchRunner:
    start()
    runner = open_runner(files, options, device(options), FREE)
    assert isinstance(runner, TorchRunner)
    return runner


def logits(runner: TorchRunner) -> Tensor:
    """Logits of the last token of a short prompt."""
    ops = runner.device.ops
    with torch.inference_mode():
        step = runner.inputs.send(make_batch([Row([5, 9, 77, 3, 20], 0, [1])], runner.spec.vocab_size)).step
        return runner.model.logits(runner.model(step, ops, runner.kv), ops)[0].float().cpu()


@pytest.mark.parametrize("quant", PRODUCTS)
@pytest.mark.parametrize("label", ["llama", "qwen2_moe", "qwen3_moe"])
def test_logits_are_near_those_of_the_cpu(label: str, quant: Quant, tmp_path: Path) -> None:
    files = files_of(label, tmp_path)
    with OpsOfTorchNpu() as called:
        result = logits(opened(files, replace(OPTIONS, quant=quant)))
    expected = logits(open_on_cpu(files, replace(OPTIONS, quant=quant), FREE))  # type: ignore[arg-type]
    assert torch.cosine_similarity(result, expected, dim=0) > (0.998 if quant == "int8" else 0.999)
    has_experts = "moe" in label and quant != "fp8"
    assert called.names >= PRODUCTS[quant] | (EXPERTS if has_experts else set())


@pytest.mark.parametrize("kind", [modelslim.static, modelslim.dynamic], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("label", ["llama", "qwen2"])
def test_checkpoints_of_msmodelslim(label: str, kind: Any, tmp_path: Path) -> None:
    """Against a dequantised model of floats on the CPU."""
    modelslim.save(tmp_path / "small", tmp_path / "meant", kind, label)
    with OpsOfTorchNpu() as called:
        result = logits(opened(read_model(tmp_path / "small"), OPTIONS))
    meant = open_on_cpu(read_model(tmp_path / "meant"), OPTIONS, FREE)
    assert torch.cosine_similarity(result, logits(meant), dim=0) > 0.99  # type: ignore[arg-type]
    rounds = {"npu_quantize"} if kind is modelslim.static else {"npu_dynamic_quant"}
    assert called.names & {"npu_quantize", "npu_dynamic_quant"} == rounds
    assert "npu_quant_matmul" in called.names


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_second_load_reads_the_packed_file(quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_PACKED_BYTES", 0)
    files = files_of("qwen2_moe", tmp_path / "model")
    options = replace(OPTIONS, quant=quant, packed_dir=tmp_path / "packed")
    formats: list[int] = []
    lay_out = WeightFormats.lay_out

    def recorder(self: WeightFormats, op: str, weight: Any) -> Any:
        weight = lay_out(self, op, weight)
        formats.append(torch_npu.get_npu_format(weight_tensors(weight)[0]))
        return weight

    monkeypatch.setattr(WeightFormats, "lay_out", recorder)
    first, second = (opened(files, options) for _ in range(2))
    assert torch.equal(logits(first), logits(second))
    assert first.spec.warnings == second.spec.warnings
    assert first.spec.weight_bytes == second.spec.weight_bytes
    half = len(formats) // 2
    assert formats[:half] == formats[half:]
    assert (NPUACLFormat.FRACTAL_NZ in formats) == (quant == "int8")  # no other weight of the tiny model is aligned


@pytest.mark.parametrize("label", ["llama", "llama-tied", "qwen2_moe"])
@pytest.mark.parametrize("quant", PRODUCTS)
def test_expected_bytes_are_near_the_loaded_bytes(quant: Quant, label: str, tmp_path: Path) -> None:
    """A head whose weights are columns shares no memory with a tied embedding."""
    files = files_of(label, tmp_path)
    options = replace(OPTIONS, quant=quant)
    runner = opened(files, options)
    expected = Loader(files, options, device(options), torch.bfloat16).expected_bytes()
    assert expected == pytest.approx(runner.spec.weight_bytes, rel=0.01 if quant == "none" else 0.07)


def test_plain_layout_and_references_are_named_in_the_warnings(tmp_path: Path) -> None:
    files = files_of("llama", tmp_path)
    plain = opened(files, replace(OPTIONS, weight_layout="plain"))
    assert any("are ND: weight_layout is plain" in warning for warning in plain.spec.warnings)
    quantised = opened(files, replace(OPTIONS, quant="fp8"))
    assert any("in fp8 are computed by references" in warning for warning in quantised.spec.warnings)


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_chunk_that_draws_no_token_is_a_step_without_rows(quant: Quant, tmp_path: Path) -> None:
    """Its last layer, its final norm and its head compute nothing. The next chunk reads its keys and values."""
    runner = opened(files_of("qwen2_moe", tmp_path), replace(OPTIONS, quant=quant))
    prompt = [5, 9, 77, 3, 20, 101, 8]
    whole = make_batch([Row(prompt, 0, [2], want=Want.HIDDEN)], runner.spec.vocab_size)
    chunks = [Row(prompt[:4], 0, [1], want=Want.NOTHING), Row(prompt[4:], 4, [1], want=Want.HIDDEN)]
    short = TorchRunner(runner.model, runner.kv, runner.spec, runner.device, capturable=0)
    first, second = (short.run(make_batch([row], runner.spec.vocab_size)).result() for row in chunks)
    assert not len(first.tokens)
    expected = runner.run(whole).result().hidden
    assert second.hidden is not None
    assert expected is not None
    cosine = torch.cosine_similarity(torch.from_numpy(second.hidden), torch.from_numpy(expected))
    assert cosine.min() > 0.998
