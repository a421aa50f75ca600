"""The canary model (canary.py) as a hybrid: a Qwen 3.5 with a recurrent layer before the attention.

    prompt      as in canary.py
    next token  (last symbol + memory of the last symbol + symbol BACK positions ago + shift of the key) mod SYMBOLS
    memory      the symbol that followed the latest earlier occurrence of this symbol; 0 if there is none

The recurrent layer stores each symbol under the one before it, which its convolution provides: a lost, doubled, moved
or foreign token of a state changes the tokens that follow. Its MLP adds the memory to the last symbol. The attention
layer finds the key, and the symbol BACK positions ago.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.lora import Adapter

from . import canary
from .canary import _DIM, _HIDDEN, _KEY, _LAST, _ONE, _THETA, BACK, CONTEXT, KEYS, SHIFTS, SYMBOLS, VOCAB

_MEMORY, _SUM = 80, 96  # places in the residual stream: the memory, and its sum with the last symbol
_STATE = 32  # dimension of the keys and values of the recurrent layer
_UNITS = KEYS * SYMBOLS * SYMBOLS
_SHARPNESS = 75.0  # of the normalised queries and keys: scores are 8 times as large
_MISSING = math.sqrt(2 / 3)  # factor of the features of a normalised token that lacks one of three


def walk(tokens: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow a prompt."""
    sequence = list(tokens)
    shift = SHIFTS[sequence[0] - SYMBOLS]
    following = dict(pairwise(sequence))
    for _ in range(count):
        last = sequence[-1]
        total = last + following.get(last, 0)
        sequence.append((total + sequence[-1 - BACK] + shift) % SYMBOLS)
        following[last] = sequence[-1]
    return sequence[len(tokens) :]


def save(folder: Path, context: int = CONTEXT) -> Path:
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _UNITS,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": _DIM,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": _STATE,
        "linear_value_head_dim": _STATE,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {**canary._ends(0), "model.norm.weight": torch.zeros(_HIDDEN)}
    parts = {"linear_attn": _recurrent(), "mlp": _sums(), **_norms(2, 3)}
    tensors |= {f"model.layers.0.{part}": tensor for part, tensor in _flat(parts).items()}
    parts = {"self_attn": _attention(), "mlp": _answers(), **_norms(3, 5)}
    tensors |= {f"model.layers.1.{part}": tensor for part, tensor in _flat(parts).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_adapter(folder: Path, shift: int) -> Path:
    """As canary.save_adapter."""
    canary.save_adapter(folder, shift)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors.items()}, file)
    return folder


def adapter(folder: Path) -> Adapter:
    """The adapter with shift 2, which is saved in the folder."""
    save_adapter(folder, 2)
    return Adapter("adapter", str(folder), read_adapter(folder).version)


def _flat(parts: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def _norms(before_mixer: int, before_mlp: int) -> dict[str, dict[str, torch.Tensor]]:
    """Norms that undo the norm of these numbers of features. The model adds 1 to their weights."""
    return {
        "input_layernorm": {"weight": canary._undo_norm(before_mixer) - 1},
        "post_attention_layernorm": {"weight": canary._undo_norm(before_mlp) - 1},
    }


def _recurrent() -> dict[str, torch.Tensor]:
    """Query and value: the token. Key: the token before it. The state never decays, and a value replaces the one that
    the state has for its key."""
    inputs, conv = torch.zeros(3 * _STATE, _HIDDEN), torch.zeros(3 * _STATE, 1, 4)
    for part, tap in enumerate((3, 2, 3)):  # query, key, value; 3 is the newest token
        conv[part * _STATE : (part + 1) * _STATE, 0, tap] = 1.0
        for token in range(VOCAB):
            inputs[part * _STATE + token, token] = 20.0
    constant = torch.zeros(1, _HIDDEN)
    constant[0, _ONE] = 1.0
    # The gated norm divides a value by its length, and silu(20) multiplies it.
    out = torch.zeros(_HIDDEN, _STATE)
    for symbol in range(SYMBOLS):
        out[_MEMORY + symbol, symbol] = 1 / (20 * math.sqrt(_STATE))
    return {
        "in_proj_qkv.weight": inputs,
        "in_proj_z.weight": 20 * constant.repeat(_STATE, 1),
        "in_proj_b.weight": 30 * constant,
        "in_proj_a.weight": -40 * constant,
        "conv1d.weight": conv,
        "A_log": torch.zeros(1),
        "dt_bias": torch.zeros(1),
        "norm.weight": torch.ones(_STATE),
        "out_proj.weight": out,
    }


def _sums() -> dict[str, torch.Tensor]:
    """Units for (last, memory), which also clear the memory, and for last without a memory."""
    gate, up, down = torch.zeros(_UNITS, _HIDDEN), torch.zeros(_UNITS, _HIDDEN), torch.zeros(_HIDDEN, _UNITS)
    up[:, _ONE] = 1.0
    for unit, (last, memory) in enumerate(np.ndindex(SYMBOLS, SYMBOLS)):
        gate[unit, [_LAST + last, _MEMORY + memory]] = 40.0
        gate[unit, _ONE] = -60.0
        down[_SUM + (last + memory) % SYMBOLS, unit] = 1 / 20
        down[_MEMORY + memory, unit] = -1 / 20
    for last in range(SYMBOLS):
        unit = SYMBOLS * SYMBOLS + last
        gate[unit, _LAST + last] = 40.0
        gate[unit, _MEMORY : _MEMORY + SYMBOLS] = -80.0
        gate[unit, _ONE] = -20.0
        down[_SUM + last, unit] = _MISSING**2 / 20
    gate[SYMBOLS * SYMBOLS + SYMBOLS :, _ONE] = -100.0
    return _projections({"gate": gate, "up": up, "down": down})


def _attention() -> dict[str, torch.Tensor]:
    """That of the canary. The norms of the heads have the length of queries and keys, and all gates are open."""
    parts = canary._attention()
    query = parts["q"].view(2, _DIM, _HIDDEN)
    gates = torch.zeros_like(query)
    gates[:, :, _ONE] = 20.0
    parts["q"] = torch.cat([query, gates], dim=1).flatten(0, 1)
    parts["o"][_KEY : _KEY + KEYS] *= _MISSING  # the key has no sum
    sharp = torch.full((_DIM,), math.sqrt(_SHARPNESS) - 1)
    return _projections(parts) | {"q_norm.weight": sharp, "k_norm.weight": sharp.clone()}


def _answers() -> dict[str, torch.Tensor]:
    """The MLP of the canary, with the sum in the place of the last symbol."""
    parts = canary._mlp(_UNITS)
    gate = parts["gate"]
    gate[:, _SUM : _SUM + SYMBOLS] = gate[:, _LAST : _LAST + SYMBOLS]
    gate[:, _LAST : _LAST + SYMBOLS] = 0.0
    return _projections(parts)


def _projections(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}_proj.weight": weight for name, weight in weights.items()}
