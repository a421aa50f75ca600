"""Latent attention on the NPU: its kernel, and whole models whose cache has rotated keys and latents apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu.device import open_on_cpu
from localllm.backends.npu import latent
from localllm.backends.npu.device import device
from localllm.backends.npu.installation import start
from localllm.backends.npu.ops import OPS
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.runner import Runner
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.attention import _latents
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, device_arguments, mismatch, reference_run

from ..backends.teacher import forced
from ..backends.tiny import TINIES
from . import kernels

KERNEL = "npu::npu_fused_infer_attention_score_v2"
APART = [case for case in CASES if "latent" in case.op and "apart" in case.label]


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", APART, ids=str)
def test_cases_apart_are_near_the_reference(case: Case, dtype: torch.dtype) -> None:
    arguments, expected = reference_run(case, dict(Ops())[case.op], dtype)
    on_device = device_arguments(case, OPS, arguments, "npu", dtype)
    kernels.calls.clear()
    outputs = call_op(case, dict(OPS)[case.op], on_device)
    assert not mismatch(outputs, expected, case.tolerances[dtype])
    is_wide = case.label.startswith("apart-") and case.op == "attention.latent"
    assert kernels.calls[KERNEL] == (is_wide and dtype == torch.bfloat16)


OPTIONS = LoadOptions(cache_bytes=2**23, page_size=16, max_rows=4, max_step_tokens=64, context=128, threads=1)
FREE = 2**30
LABELS = ("deepseek_v2", "deepseek_v2-groups", "deepseek_v3", "deepseek_v3-yarn", "deepseek_v3-dense")
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32}  # the dimensions of the kernel
REAL = {"heads": 4, "rotary": 64, "rank": 512, "page_size": 128}
PROMPT = 40  # longer than the rows of the kernel


def saved(label: str, folder: Path, **more: int) -> ModelFiles:
    tiny = next(tiny for tiny in TINIES if tiny.label == label)
    replace(tiny, more={**tiny.more, **more}).save(folder)
    return read_model(folder)


def logprobs(runner: Runner) -> Tensor:
    """Log-probabilities of prompts, chunks and decode steps."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(1, runner.spec.vocab_size, (2, PROMPT), generator=generator).tolist()
    return forced(runner, prompts)[1]


@pytest.mark.emulated
@pytest.mark.parametrize("label", LABELS)
def test_models_give_the_logits_of_the_cpu(label: str, tmp_path: Path) -> None:
    files = saved(label, tmp_path)
    options = replace(OPTIONS, dtype="float32", graphs="off")
    start()
    runner = open_runner(files, options, device(options), FREE)
    assert isinstance(runner, TorchRunner)
    assert runner.kv.values is not None, "rotated keys and latents are apart"
    expected = logprobs(open_on_cpu(files, options, FREE))
    torch.testing.assert_close(logprobs(runner), expected, rtol=0, atol=1e-3)


@pytest.mark.emulated
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.1), (torch.bfloat16, 0.6)], ids=str)
@pytest.mark.parametrize("graphs", ["off", "full", "breakable", "split"])
def test_kernels_compute_models_with_real_dimensions(
    graphs: Graphs, dtype: torch.dtype, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = saved("deepseek_v3-dense", tmp_path, **WIDE)
    options = replace(OPTIONS, graphs=graphs, compiler="eager")
    start()
    monkeypatch.delattr(latent, "reference")
    kernels.calls.clear()
    actual = logprobs(open_runner(files, options, replace(device(options), dtype=dtype), FREE))
    expected = logprobs(open_on_cpu(files, replace(options, dtype="float32", graphs="off"), FREE))
    assert (actual - expected).abs().max() < bound
    assert kernels.calls[KERNEL] > 0
    assert (kernels.calls[f"{KERNEL}.out"] > 0) == (graphs != "off"), "captured decode steps"


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        ({"heads": 128}, 1),
        ({"heads": 1, "page_size": 16}, 1),
        ({"heads": 24}, 0),
        ({"page_size": 64}, 0),
        ({"rank": 256}, 0),
        ({"rotary": 32}, 0),
    ],
    ids=str,
)
def test_kernel_computes_the_shapes_of_its_documentation(shape: dict[str, int], calls: int) -> None:
    make = _latents([(1, 40), (3, 20)], **{**REAL, **shape}, apart=True)
    case = Case("attention.latent", "shape", make)
    arguments, expected = reference_run(case, dict(Ops())[case.op], torch.bfloat16)
    kernels.calls.clear()
    outputs = call_op(case, OPS.attention.latent, device_arguments(case, OPS, arguments, "npu", torch.bfloat16))
    assert not mismatch(outputs, expected, case.tolerances[torch.bfloat16])
    assert kernels.calls[KERNEL] == calls
