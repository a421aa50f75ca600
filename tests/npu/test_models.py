"""Models of every architecture on the fake NPU, teacher-forced, against transformers; and the answers of guide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from localllm.app import paths
from localllm.backends.npu.device import device
from localllm.backends.npu.installation import start
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.opening import open_runner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs, LoadOptions
from localllm.kernels.ops import Ops

from ..backends.conformance import Conversation
from ..backends.pages import SLOW_PAGES
from ..backends.teacher import difference, expected
from ..backends.tiny import TINIES, Tiny
from .op_cases import OpsOfTorchNpu

pytestmark = pytest.mark.emulated

FREE = 2**30
ANSWERS, TOKENS, LENGTH = 8, 24, 60
KERNELS = {"npu_fused_infer_attention_score_v2", "npu_scatter_pa_kv_cache", "npu_rms_norm", "npu_swiglu"}


def errors_of(
    npu: Device | None, folder: Path, shape: Tiny, logits: list[Tensor], graphs: Graphs, dtype: str
) -> Tensor:
    """Absolute errors of the log-probabilities. `npu`: None for the fake NPU."""
    options = LoadOptions(
        context=shape.context,
        cache_bytes=2**25,
        max_rows=4,
        max_step_tokens=64,
        threads=1,
        dtype=dtype,
        graphs=graphs,
    )
    errors, _ = difference(open_runner(read_model(folder), options, npu or device(options), FREE), shape, logits)
    return errors.abs()


@pytest.mark.parametrize("graphs", ["full", "breakable"])
@pytest.mark.parametrize("shape", [*TINIES, *SLOW_PAGES], ids=str)
def test_float32_equals_transformers(shape: Tiny, graphs: Graphs, tmp_path: Path) -> None:
    """Attention and products of torch_npu have no float32, so references compute them; norms and rotations have."""
    start()
    logits = expected(shape, tmp_path)
    assert errors_of(None, tmp_path, shape, logits, graphs, "float32").max() < 1e-3


@pytest.mark.parametrize("shape", TINIES, ids=lambda shape: shape.label)
def test_bfloat16_is_as_near_to_transformers_as_the_references(shape: Tiny, tmp_path: Path) -> None:
    """The mean error. The largest one is that of an expert whose score is nearly that of another."""
    start()
    logits = expected(shape, tmp_path, torch.bfloat16)
    references = Device("references", "cpu", torch.cpu, Ops(), torch.bfloat16, page_size=128)
    usual = errors_of(references, tmp_path, shape, logits, "off", "bfloat16").mean()
    actual = errors_of(None, tmp_path, shape, logits, "full", "bfloat16").mean()
    assert actual < 1.5 * usual + 1e-3


@pytest.mark.parametrize("label", ["llama", "qwen3_moe"])
def test_float16_checkpoints_are_near_to_transformers(label: str, tmp_path: Path) -> None:
    """The weights become bfloat16."""
    start()
    shape = next(tiny for tiny in TINIES if tiny.label == label)
    logits = expected(shape, tmp_path, torch.float16)
    with OpsOfTorchNpu() as called:
        error = errors_of(None, tmp_path, shape, logits, "full", "auto").mean()
    references = Device("references", "cpu", torch.cpu, Ops(), torch.bfloat16, page_size=128)
    usual = errors_of(references, tmp_path, shape, logits, "off", "bfloat16").mean()
    assert error < 1.5 * usual + 1e-3
    assert called.names >= KERNELS


@pytest.mark.parametrize("graphs", ["full", "breakable"])
def test_guide_gives_its_known_answers(graphs: Graphs) -> None:
    """In bfloat16, with every kernel of the NPU that guide needs. The answers of `localllm selftest` have margins."""
    start()
    folder = paths.guide_dir()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = json.loads((folder / "answers.json").read_text("utf-8"))[:ANSWERS]
    options = LoadOptions(cache_bytes=2**26, max_rows=4, max_step_tokens=64, threads=1, graphs=graphs)
    with OpsOfTorchNpu() as called:
        talk = Conversation(open_runner(read_model(folder), options, device(options), FREE))
        for entry in known:
            chat = f"<|im_start|>user\n{entry['prompt']}<|im_end|>\n<|im_start|>assistant\n"
            talk.submit(entry["prompt"], tokenizer.encode(chat).ids, TOKENS)
        answers = talk.finish()
    assert called.names >= KERNELS
    for entry in known:
        assert entry["answer"].startswith(tokenizer.decode(answers[entry["prompt"]])[:LENGTH])
