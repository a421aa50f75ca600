"""A Llama model with constructed weights, whose next tokens are known and have wide margins.

    prompt      key, then at least BACK + 1 symbols
    next token  (last symbol + symbol BACK positions ago + shift of the key) mod SYMBOLS

One head finds the key by its content, wherever it is; the other looks BACK positions back, so every page is read
again later, and one lost, doubled, moved or foreign token changes all that follows. The MLP has a unit for every
(key, last, back). It runs on any backend that runs Llama, and its tokens are compared as integers.

With a window, the model is a Qwen 2 of two layers: the first finds the key, and the second, which has the window, looks
back. A window of BACK + 1 positions is just wide enough.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.lora import Adapter

KEYS, SYMBOLS, BACK = 5, 16, 19
VOCAB = SYMBOLS + KEYS
SHIFTS = (0, 3, 5, 10, 14)
CONTEXT = 512

_HIDDEN, _DIM, _THETA = 128, 64, 1e12
# Where features lie in the residual stream: one-hot last symbol, key, symbol read back, answer, and a constant 1.
_LAST, _KEY, _BACK, _ANSWER, _ONE = 0, SYMBOLS, 2 * SYMBOLS, 3 * SYMBOLS, 4 * SYMBOLS
# Pairs of dimensions. RoPE rotates the fast ones enough to distinguish positions, and the slow one hardly.
_FAST, _SLOW = range(8), 31
_SHARPNESS = 600.0  # scale of the attention scores of both heads


def prompt(key: int, length: int, seed: int) -> list[int]:
    """A random prompt of `length` tokens, the first its key."""
    assert length > BACK + 1, "the last token must be able to look back at a symbol"
    return [SYMBOLS + key, *np.random.default_rng(seed).integers(0, SYMBOLS, length - 1).tolist()]


def walk(tokens: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow a prompt."""
    sequence = list(tokens)
    shift = SHIFTS[sequence[0] - SYMBOLS]
    for _ in range(count):
        sequence.append((sequence[-1] + sequence[-1 - BACK] + shift) % SYMBOLS)
    return sequence[len(tokens) :]


def save(folder: Path, dtype: torch.dtype = torch.float32, padding: int = 0, context: int = CONTEXT) -> Path:
    """`padding`: number of tokens after the keys, which the model does not draw unless a mask leaves no other."""
    units = KEYS * SYMBOLS * SYMBOLS
    config = _config(units, context) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB + padding,
        "num_hidden_layers": 1,
        "torch_dtype": str(dtype).rpartition(".")[2],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _ends(padding) | _layer(0, _attention(), _mlp(units), features=2)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_windowed(folder: Path, window: int = BACK + 1, context: int = CONTEXT) -> Path:
    """The model with a window of `window` positions in its second layer."""
    units = KEYS * SYMBOLS * SYMBOLS
    config = _config(units, context) | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _ends(0)
    for index, features in enumerate((2, 3)):
        attention = _attention()
        other = slice(_DIM, None) if index == 0 else slice(0, _DIM)  # the head that this layer does not use
        attention["o"][:, other] = 0.0
        mlp = _mlp(units)
        if index == 0:
            mlp["down"].zero_()
        biases = {name: torch.zeros(len(attention[name])) for name in "qkv"}
        tensors |= _layer(index, attention, mlp, features)
        tensors |= {f"model.layers.{index}.self_attn.{name}_proj.bias": bias for name, bias in biases.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_adapter(folder: Path, shift: int) -> Path:
    """An adapter under which key k acts as key (k + shift) % KEYS. It changes the values in the cache, so an answer
    from the cache of another adapter is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": KEYS, "lora_alpha": KEYS, "target_modules": ["v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    a = torch.zeros(KEYS, _HIDDEN)
    b = torch.zeros(_DIM, KEYS)
    for key in range(KEYS):
        a[key, _KEY + key] = 1.0
        b[_KEY + key, key] -= 1.0
        b[_KEY + (key + shift) % KEYS, key] += 1.0
    module = "base_model.model.model.layers.0.self_attn.v_proj"
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapter(folder: Path) -> Adapter:
    """The adapter with shift 2, which is saved in the folder."""
    save_adapter(folder, 2)
    return Adapter("adapter", str(folder), read_adapter(folder).version)


def _config(units: int, context: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": units,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": _DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": _THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _ends(padding: int) -> dict[str, torch.Tensor]:
    """The tensors before and after the layers."""
    return {
        "model.embed_tokens.weight": _embedding(padding),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": _head(padding),
    }


def _layer(
    index: int, attention: dict[str, torch.Tensor], mlp: dict[str, torch.Tensor], features: int
) -> dict[str, torch.Tensor]:
    """The tensors of a layer. `features`: number of features in the residual stream before the layer."""
    layer = f"model.layers.{index}"
    return {
        f"{layer}.input_layernorm.weight": _undo_norm(features),
        f"{layer}.post_attention_layernorm.weight": _undo_norm(features=4),
        **{f"{layer}.self_attn.{name}_proj.weight": weight for name, weight in attention.items()},
        **{f"{layer}.mlp.{name}_proj.weight": weight for name, weight in mlp.items()},
    }


def under(tokens: Sequence[int], shift: int) -> list[int]:
    """A prompt for which the base model gives the answer that the adapter with this shift gives for `tokens`."""
    return [SYMBOLS + (tokens[0] - SYMBOLS + shift) % KEYS, *tokens[1:]]


def _undo_norm(features: int) -> torch.Tensor:
    """The weight that undoes the norm of a vector with this number of features at 1 and all others at 0."""
    return torch.full((_HIDDEN,), math.sqrt(features / _HIDDEN))


def _embedding(padding: int) -> torch.Tensor:
    weight = torch.zeros(VOCAB + padding, _HIDDEN)
    weight[:, _ONE] = 1.0
    for token in range(VOCAB):
        weight[token, token] = 1.0  # symbols at _LAST, keys at _KEY, as the ids are laid out
    return weight


def _attention() -> dict[str, torch.Tensor]:
    query, key, value = torch.zeros(2 * _DIM, _HIDDEN), torch.zeros(_DIM, _HIDDEN), torch.zeros(_DIM, _HIDDEN)
    out = torch.zeros(_HIDDEN, 2 * _DIM)
    strength = math.sqrt(_SHARPNESS * math.sqrt(_DIM) / 8)
    # Head 0: a constant query meets keys that only key tokens have, in a pair that hardly turns.
    query[_SLOW, _ONE] = strength
    key[_SLOW, _KEY : _KEY + KEYS] = strength
    # Head 1: all keys are alike and turn with position; the query is turned back by BACK positions.
    for pair in _FAST:
        angle = BACK * _THETA ** (-2 * pair / _DIM)
        key[pair, _ONE] = strength
        query[_DIM + pair, _ONE] = strength * math.cos(angle)
        query[_DIM + pair + _DIM // 2, _ONE] = -strength * math.sin(angle)
    for feature in range(VOCAB):
        value[feature, feature] = 1.0
    for key_feature in range(_KEY, _KEY + KEYS):
        out[key_feature, key_feature] = 1.0
    for symbol in range(SYMBOLS):
        out[_BACK + symbol, _DIM + symbol] = 1.0
    return {"q": query, "k": key, "v": value, "o": out}


def _mlp(units: int) -> dict[str, torch.Tensor]:
    gate, up, down = torch.zeros(units, _HIDDEN), torch.zeros(units, _HIDDEN), torch.zeros(_HIDDEN, units)
    gate[:, _ONE] = -2.5 * 40.0  # silu of -20 is nothing, of +20 is 20: a unit is on if all three features are
    up[:, _ONE] = 1.0
    for unit, (key, last, back) in enumerate(np.ndindex(KEYS, SYMBOLS, SYMBOLS)):
        gate[unit, [_KEY + key, _LAST + last, _BACK + back]] = 40.0
        down[_ANSWER + (last + back + SHIFTS[key]) % SYMBOLS, unit] = 1.0
    return {"gate": gate, "up": up, "down": down}


def _head(padding: int) -> torch.Tensor:
    weight = torch.zeros(VOCAB + padding, _HIDDEN)
    weight[VOCAB:, _ONE] = -8.0
    for symbol in range(SYMBOLS):
        weight[symbol, _ANSWER + symbol] = 1.0
    return weight
