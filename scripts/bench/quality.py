"""What smaller weights cost: mean KL divergence and perplexity against the same model in bf16, and guide's examination.

`python scripts/bench/quality.py [MODEL FOLDER …]`: the built-in model on conversations it was not trained on and on its
held-out questions, every folder on random tokens (KL alone: a model with random weights predicts nothing). The peer is
bf16; `ours` of KL is in nats per token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rows import Row, row, save
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.train_guide import evaluate
from scripts.train_guide.chatml import END
from scripts.train_guide.corpus import HELDOUT
from scripts.train_guide.dataset import texts
from scripts.train_guide.facts import Facts

from localllm.app import paths
from localllm.backends import cpu
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.batch import Batch, SamplingRows, Want
from localllm.engine.engine import Engine
from localllm.engine.modelfiles import read_model
from localllm.engine.quantization import Quant
from localllm.engine.request import Delta, Request
from localllm.engine.runner import Budget

QUANTS: tuple[Quant, ...] = ("int8", "int4", "fp8")
UNSEEN = 987_654  # a seed that no training run has used
CONVERSATIONS, RANDOM_TEXTS, LENGTH = 200, 4, 256
LONGEST = 512
PAGE = 16


def opened(folder: Path, quant: Quant) -> TorchRunner:
    budget = Budget(context=LONGEST, max_rows=32, max_step_tokens=LONGEST, page_size=PAGE, dtype="float32", quant=quant)
    runner = cpu.open(read_model(folder), budget)
    assert isinstance(runner, TorchRunner)
    return runner


@torch.inference_mode()
def log_probabilities(runner: TorchRunner, tokens: list[int]) -> torch.Tensor:
    """Of every next token at every place of a text [tokens, vocab]."""
    count = len(tokens)
    pages = np.arange(1, -(-count // PAGE) + 1, dtype=np.int32)[None]
    batch = Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(count, dtype=np.int32),
        row_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        page_table=pages,
        wants=np.array([Want.TOKEN]),
        **REST,
    )
    step = runner.inputs.send(batch).step
    every = replace(step, last=torch.arange(count, dtype=torch.int32))
    ops = runner.device.ops
    return runner.model.logits(runner.model(every, ops, runner.kv), ops).log_softmax(-1)


REST: dict[str, object] = {}
