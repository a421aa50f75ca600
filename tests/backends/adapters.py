"""Adapters for tests of backends: made by PEFT, with random factors, and compared by log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from localllm.backends import cpu, cuda, mlx
from localllm.engine.batch import Batch
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.runner import DeviceInfo, Runner, StepResult

from .batches import Row, make_batch
from .tiny import TINIES, VOCAB, Tiny

OPTIONS = LoadOptions(
    context=64, cache_bytes=2**24, max_rows=16, page_size=8, dtype="float32", adapter_slots=4, adapter_rank=16
)
BACKENDS = ["cpu", "torch_native", pytest.param("mlx", marks=pytest.mark.real_otherdevice)]
NO_GPU = pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason=f"no GPU to use: {cuda.probe()}")
# The implementations of LoRA products on a GPU, "auto" chooses among them; each with both dtypes.
GPU_BACKENDS = [
    pytest.param(f"cuda {lora} {dtype}", marks=[NO_GPU, pytest.mark.real])
    for lora in ("auto", "cpp", "triton", "csgmv", "torch_native")
    for dtype in ("float32", "bfloat16")
]


def open_on(backend: str, folder: Path, options: LoadOptions = OPTIONS) -> Runner:
    """Open the model on "cpu", also in "cpu bfloat16", on "torch_native" (the CPU with the reference of LoRA products),
    on "mlx" or on a GPU ("cuda", the implementation of LoRA products and the dtype)."""
    files = read_model(folder)
    if backend.startswith("cuda"):
        _, lora, dtype = backend.split()
        return cuda.open(files, replace(options, lora_backend=lora, dtype=dtype))
    if backend == "mlx":
        pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")
        return mlx.open(files, options)
    if backend == "torch_native":
        options = replace(options, lora_backend=backend)
    if backend.endswith("bfloat16"):
        options = replace(options, dtype="bfloat16")
    return cpu.open(files, options)


def tiny_of(label: str) -> Tiny:
    return next(tiny for tiny in TINIES if tiny.label == label)


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def adapter_configs(tiny: Tiny) -> list[LoraConfig]:
    """Unlike ranks, targets and scales."""
    linear = PHI if tiny.model_type == "phi3" else LINEAR
    return [
        LoraConfig(r=4, lora_alpha=8, target_modules=list(linear)),
        LoraConfig(r=16, lora_alpha=16, use_rslora=True, target_modules=[linear[0], linear[-1]]),
        LoraConfig(
            r=8,
            lora_alpha=4,
            target_modules=[*linear, "embed_tokens", "lm_head"],
            rank_pattern={"o_proj": 3},
            alpha_pattern={"model.layers.1.mlp.down_proj": 24},
        ),
    ]


def save_adapter(base: torch.nn.Module, config: LoraConfig, folder: Path, seed: int, *, copies: bool = False) -> None:
    """A PEFT adapter with random factors. PEFT itself starts with B = 0. `copies`: with the weights of an embedding and
    of a head that have factors, as PEFT saves them by default."""
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.3).bfloat16().float()
    model.save_pretrained(folder, save_embedding_layers="auto" if copies else False)
    model.unload()


def adapter_of(folder: Path) -> Adapter:
    return Adapter(folder.name, str(folder), read_adapter(folder).version)


def put(runner: Runner, slot: int, adapter: Adapter) -> None:
    runner.prepare_adapter(adapter)
    runner.load_adapter(slot, adapter)


@torch.inference_mode()
def log_probabilities(model: Any, tokens: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)


def run(runner: Runner, rows: Sequence[Row], slots: Sequence[int], scales: Sequence[float] | None = None) -> Tensor:
    """[rows, vocab] log-probabilities behind each row."""
    return logprobs_of(run_batch(runner, rows, slots, scales))


def run_batch(
    runner: Runner, rows: Sequence[Row], slots: Sequence[int], scales: Sequence[float] | None = None
) -> StepResult:
    """A step with the log-probabilities of all tokens."""
    batch = make_batch(rows, VOCAB, groups=len(runner.spec.groups))
    sampling = replace(batch.sampling, logprobs=np.full(len(batch.sampling.logprobs), VOCAB, np.int32))
    scales = [1.0] * len(rows) if scales is None else scales
    adapted: Batch = replace(
        batch, sampling=sampling, adapters=np.array(slots, np.int32), adapter_scales=np.array(scales, np.float32)
    )
    return runner.run(adapted).result()


def logprobs_of(result: StepResult) -> Tensor:
    """[samples, vocab]."""
    assert result.top_tokens is not None
    assert result.top_logprobs is not None
    order = torch.from_numpy(result.top_tokens.copy()).long()
    values = torch.from_numpy(result.top_logprobs.copy())
    return torch.full((len(order), VOCAB), torch.nan).scatter_(1, order, values)


def pages(row: int) -> range:
    return range(1 + 4 * row, 5 + 4 * row)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


def mean_error(actual: Tensor, expected: Tensor) -> Tensor:
    """[rows] mean differences of log-probabilities [rows, vocab]."""
    return (actual - expected).abs().mean(1)


def check_adapter(tiny: Tiny, targets: Sequence[str], folder: Path) -> None:
    """A row with an adapter of the projections `targets`, beside a row without, against PEFT on the CPU. `folder`: an
    empty folder."""
    tiny.save(folder / "model")
    base = tiny.save(folder / "copy")
    save_adapter(base, LoraConfig(r=4, target_modules=list(targets)), folder / "adapter", 1)
    runner = open_on("cpu", folder / "model")
    put(runner, 1, adapter_of(folder / "adapter"))
    prompt = list(range(5, 25))
    plain, adapted = run(runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [0, 1])
    assert (plain - adapted).abs().max() > 0.05
    torch.testing.assert_close(plain, log_probabilities(base, prompt)[-1], rtol=0, atol=1e-4)
    adapted_model = PeftModel.from_pretrained(base, folder / "adapter")
    torch.testing.assert_close(adapted, log_probabilities(adapted_model, prompt)[-1], rtol=0, atol=1e-4)
