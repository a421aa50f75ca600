"""Writes the files of a tiny qwen3 model with random weights and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 512
END = "<|im_end|>"

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""

_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}',
    "# Tools system user assistant tool 0 1 2 3 4 5 6 7 8 9 true false null",
    "größer, naïve, 日本語 and 🙂 text",
]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


def write_tokenizer(folder: Path, template: object = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    pad = {"__type": "AddedToken", "content": "<|endoftext|>"}
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": END, "pad_token": pad, "bos_token": None}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, *, context: int = 256, seed: int = 0, template: object = TEMPLATE) -> Path:
    """Write a model with two layers of width 32. Its weights are large enough that greedy text varies."""
    write_tokenizer(folder, template)
    hidden, layers, heads, kv_heads, dim, inner = 32, 2, 4, 2, 8, 64
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": inner,
        "vocab_size": VOCAB,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, hidden), "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors |= {f"{name}{part}.weight": weight(*shape) for part, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = np.ones(hidden, np.float32)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{name}self_attn.{norm}.weight"] = np.ones(dim, np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder
