"""Writes a tiny embedding model: like Qwen3-Embedding, a qwen3 model with files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors

from .tiny_qwen import write_model

END = "<|endoftext|>"  # the tokenizer appends it to every text
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
POOLING = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def write_embedder(folder: Path, *, tied: bool = True, context: int = 256, seed: int = 0) -> Path:
    """Write a model with vectors of 32 numbers. Its weights have no output head and no prefix `model.`.

    `tied`: whether config.json says that the head has the weights of the embedding.
    """
    write_model(folder, context=context, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    weights = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): weight for name, weight in weights.items()}, folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    return folder
