"""Writes the files of a tiny llama model that writes given texts, token by token.

The chat template puts a script at a fixed distance before the end of the prompt. One attention layer reads the token at
this distance, and the head writes it: the answer repeats the script, then ends. Where a grammar forbids the next token
of the script, the model writes the first allowed token of `preferred`; the script goes on at its next token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|im_end|>"
START = "<|im_start|>"
DISTANCE = 400  # tokens from the start of a script to the first token of the answer
CONTEXT = 2048
OPENING = f"{START}assistant\n"
_SCRIPT = "<|script|>"
_VOCAB = 511  # tokens at most: each has a dimension, and one dimension is constant
_WIDTH = _VOCAB + 1
_HEAD = 64
_THETA = 100.0
_FETCHED = 1000.0  # weight of the token at the distance; that of the current token is 1
_SHARPNESS = 200.0  # of the attention
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@dataclass(frozen=True)
class Markers:
    """The added tokens of a vocabulary. `special`: the files declare them as special."""

    texts: Sequence[str] = ()
    special: bool = False


def write_script_model(
    folder: Path,
    scripts: Mapping[str, str],
    template: str,
    *,
    markers: Markers = Markers(),
    preferred: Sequence[str] = (),
    last: str = "",
) -> Tokenizer:
    """Write a model that answers the user message NAME with the text `scripts[NAME]`. Returns its tokenizer.

    `template`: renders the messages before the answer. `preferred`: texts that the model writes where a grammar forbids
    the script, the most preferred first. `last`: a text after which a token ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer([*scripts.values()], markers, preferred, last)
    tokenizer.save(str(folder / "tokenizer.json"))
    template += _ending(tokenizer, scripts)
    names = {"eos_token": END, "bos_token": None}
    config = {"tokenizer_class": "TokenizersBackend", **names, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(_config(tokenizer.token_to_id(END))))
    save_file(_weights(tokenizer, preferred), folder / "model.safetensors")
    return tokenizer


def _tokenizer(texts: Sequence[str], markers: Markers, preferred: Sequence[str], last: str) -> Tokenizer:
    """Bytes, some longer tokens of the texts, which cross the borders of words, and the preferred texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _BYTE_LEVEL
    if last:
        split = pre_tokenizers.Split(last, "merged_with_previous")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, _BYTE_LEVEL])
    tokenizer.decoder = decoders.ByteLevel()
    controls = [START, END, _SCRIPT]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB - len(controls) - len(markers.texts) - len(preferred),
        min_frequency=2,
        max_token_length=8,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())
    for text in preferred:
        vocabulary = model["model"]["vocab"]
        vocabulary.setdefault(_letters(text), len(vocabulary))
    tokenizer = Tokenizer.from_str(json.dumps(model))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    tokenizer.add_tokens([AddedToken(text, special=markers.special, normalized=False) for text in markers.texts])
    return tokenizer


def _letters(text: str) -> str:
    """A text in the letters that stand for bytes."""
    return "".join(letters for letters, _ in _BYTE_LEVEL.pre_tokenize_str(text))


def _id_of(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    return tokenizer.token_to_id(_letters(text)) if token is None else token


def _ending(tokenizer: Tokenizer, scripts: Mapping[str, str]) -> str:
    """The end of the template: the script that the last message names, then the start of the answer."""
    opening = len(tokenizer.encode(OPENING).ids)
    padded = {}
    for name, script in scripts.items():
        missing = DISTANCE - opening - len(tokenizer.encode(script).ids)
        assert missing > 0, f"the script {name} is too long"
        padded[name] = script + END * missing
    table = json.dumps(padded, ensure_ascii=False)
    name = "messages[-1].content"
    script = f"{{% if {name} in scripts %}}{_SCRIPT}{{{{ scripts[{name}] }}}}{{% endif %}}"
    return f"{{% set scripts = {table} %}}{{% if add_generation_prompt %}}{script}{START}assistant\n{{% endif %}}"


def _config(end: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _WIDTH,
        "intermediate_size": _HEAD,
        "num_hidden_layers": 1,
        "num_attention_heads": _WIDTH // _HEAD,
        "num_key_value_heads": _WIDTH // _HEAD,
        "head_dim": _HEAD,
        "vocab_size": _WIDTH,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": _THETA,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def _angles() -> NDArray[np.float64]:
    """The angles by which RoPE rotates the pairs of dimensions between two tokens at the distance."""
    return (DISTANCE - 1) * _THETA ** (-np.arange(_HEAD // 2) / (_HEAD // 2))


def _constant(head: NDArray[np.float64]) -> NDArray[np.float32]:
    """The projection that gives the same vector to each head and token."""
    weights = np.zeros((_WIDTH, _WIDTH), np.float32)
    weights[:, -1] = np.tile(head, _WIDTH // _HEAD)
    return weights


def _weights(tokenizer: Tokenizer, preferred: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """Token i has dimension i; the last dimension is constant."""
    identity = np.eye(_WIDTH, dtype=np.float32)
    scale = np.sqrt(_WIDTH / 2).astype(np.float32)  # value of both dimensions of a token after the norm
    embedding = identity.copy()
    embedding[:, -1] = 1
    head = identity.copy()
    head[-1] = 0
    ranks = [_id_of(tokenizer, text) for text in (END, *preferred)]
    head[ranks, -1] = np.linspace(0.9, 0.1, len(ranks), dtype=np.float32)
    ones = np.ones(_WIDTH, np.float32)
    query = _SHARPNESS * np.concatenate([np.cos(_angles()), -np.sin(_angles())])
    key = np.concatenate([np.ones(_HEAD // 2), np.zeros(_HEAD // 2)])
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": head,
        layer + "input_layernorm.weight": ones,
        layer + "post_attention_layernorm.weight": ones,
        layer + "self_attn.q_proj.weight": _constant(query / scale),
        layer + "self_attn.k_proj.weight": _constant(key / scale),
        layer + "self_attn.v_proj.weight": identity / scale,
        layer + "self_attn.o_proj.weight": identity * _FETCHED,
        layer + "mlp.gate_proj.weight": np.zeros((_HEAD, _WIDTH), np.float32),
        layer + "mlp.up_proj.weight": np.zeros((_HEAD, _WIDTH), np.float32),
        layer + "mlp.down_proj.weight": np.zeros((_WIDTH, _HEAD), np.float32),
    }
