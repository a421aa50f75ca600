"""Writes a model folder in the Hugging Face layout: weights in bfloat16, tokenizer, chat template and configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from .chatml import DOCUMENT_END, END, MARKERS, SPECIAL, TEMPLATE


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files to a folder beside `folder`, then rename them, so that a reader never sees an incomplete file."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(folder.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(staging / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, staging / "chat_template.jinja")
    for name, table in _tables(model.config, tokenizer).items():
        (staging / name).write_text(json.dumps(table, indent=2) + "\n", "utf-8")
    for file in staging.iterdir():
        file.replace(folder / file.name)
    staging.rmdir()


def _tables(config: Qwen3Config, tokenizer: Tokenizer) -> dict[str, dict[str, object]]:
    end = tokenizer.token_to_id(END)
    document_end = tokenizer.token_to_id(DOCUMENT_END)
    return {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": document_end,
        },
        # Almost greedy: a small model is most often right with its most probable token.
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.2,
            "top_k": 20,
            "top_p": 0.9,
            "eos_token_id": [end, document_end],
            "pad_token_id": document_end,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "bos_token": None,
            "eos_token": END,
            "pad_token": DOCUMENT_END,
            "unk_token": None,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "split_special_tokens": False,
            "added_tokens_decoder": {
                str(tokenizer.token_to_id(token)): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": token in SPECIAL,
                }
                for token in (*SPECIAL, *MARKERS)
            },
        },
    }
