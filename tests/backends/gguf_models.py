"""Writes the models of tests as GGUF files: the canary model with its adapters, and guide, the built-in model."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from localllm.app import paths

from . import canary

Tensors = Mapping[str, NDArray[np.float32]]

# Hugging Face's name of a tensor in a layer, without ".weight" -> GGUF's name.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@contextmanager
def writer(file: Path, architecture: str, shard_tensors: int = 0) -> Iterator[GGUFWriter]:
    """A writer of metadata and tensors. The file is complete when the block ends. `shard_tensors`: the tensors of each
    shard; 0: one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    opened = GGUFWriter(file, architecture, split_max_tensors=shard_tensors)
    yield opened
    opened.write_header_to_file()
    opened.write_kv_data_to_file()
    opened.write_tensors_to_file()
    opened.close()


def write_canary(folder: Path, shard_tensors: int = 0) -> Path:
    """The canary model in float32; its first shard if it has several. It has no vocabulary: the tests use token ids."""
    config, tensors = _checkpoint(canary.save(folder))
    file = folder / "canary.gguf"
    with writer(file, "llama", shard_tensors) as out:
        out.add_name("canary")
        out.add_tokenizer_model("none")
        out.add_vocab_size(canary.VOCAB)
        _add_shape(out, config)
        for name, values in tensors.items():
            out.add_tensor(name, values)
    return sorted(folder.glob("canary*.gguf"))[0]


def write_canary_adapter(file: Path, shift: int) -> Path:
    """The adapter of canary.save_adapter as a GGUF file."""
    return write_adapter(file, "llama", canary.save_adapter(file.parent / f"{file.stem}-peft", shift))


def write_adapter(file: Path, architecture: str, folder: Path) -> Path:
    """An adapter of PEFT as a GGUF file."""
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    with writer(file, architecture) as out:
        out.add_type(gguf.GGUFType.ADAPTER)
        out.add_string(gguf.Keys.Adapter.TYPE, "lora")
        out.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
        for name, tensor in load_file(folder / "adapter_model.safetensors").items():
            module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            values = tensor.T.contiguous() if side == "lora_embedding_A" else tensor  # GGUF has [vocab, rank]
            side = side.lower().replace("embedding_", "")
            out.add_tensor(f"{_gguf_name(f'{module}.weight')}.{side}", values.float().numpy())
    return file


def write_guide(file: Path, shard_tensors: int = 0) -> Path:
    """guide in float32, with its tokenizer, its chat template and its recommended sampling; its first shard if it has
    several."""
    folder = paths.guide_dir()
    config, tensors = _checkpoint(folder)
    with writer(file, "qwen3", shard_tensors) as out:
        out.add_name("guide")
        out.add_license("apache-2.0")
        _add_shape(out, config)
        _add_tokenizer(out, folder)
        for name, values in tensors.items():
            out.add_tensor(name, values)
    return sorted(file.parent.glob(f"{file.stem}-*.gguf"))[0] if shard_tensors else file


def write_embedder(file: Path, folder: Path, *, pooling: gguf.PoolingType | None = gguf.PoolingType.LAST) -> Path:
    """The embedding model that app.embedder.write_embedder has written to `folder`, in float32, as llama.cpp's
    converter writes Qwen3-Embedding. `pooling`: None: the file has no pooling type."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    with writer(file, "qwen3") as out:
        out.add_name("embedder")
        _add_shape(out, config)
        if pooling is not None:
            out.add_pooling_type(pooling)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = [tokenizer.id_to_token(token) or f"<unused{token}>" for token in range(config["vocab_size"])]
        special = {entry["content"] for entry in json.loads(tokenizer.to_str())["added_tokens"]}
        kinds = [gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL for text in tokens]
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("qwen2")
        out.add_token_list(tokens)
        out.add_token_types(kinds)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        out.add_token_merges([" ".join(merge) for merge in merges])
        out.add_eos_token_id(tokens.index("<|endoftext|>"))
        out.add_add_bos_token(False)
        out.add_add_eos_token(True)
        for name, values in load_file(folder / "model.safetensors").items():
            out.add_tensor(_gguf_name(f"model.{name}"), values.numpy())
    return file


def quantise(source: Path, file: Path, recipe: str, *, pure: bool = False) -> Path:
    """The model of `source` in the formats that llama-quantize chooses for this recipe, such as Q4_K_M.

    `pure`: every matrix has the recipe's main format, if its rows can be divided into the blocks of that format."""
    from llama_cpp import llama_cpp

    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = gguf.LlamaFileType["ALL_F32" if recipe == "F32" else f"MOSTLY_{recipe}"]
    parameters.nthread = 1
    parameters.pure = pure
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(parameters))
    assert code == 0, f"llama.cpp cannot quantise {source} to {recipe}"
    return file


def _checkpoint(folder: Path) -> tuple[dict, Tensors]:
    """The config of a Hugging Face model, and its tensors by GGUF's names, in float32."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[_gguf_name(name)] = _values(config, name, tensor)
    return config, tensors


def _gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in NAMES:
        return f"{NAMES[module]}.weight"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def _values(config: Mapping[str, int], name: str, tensor: torch.Tensor) -> NDArray[np.float32]:
    values = tensor.float().numpy()
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return values
    # ggml rotates pairs of neighbours for llama; Hugging Face rotates the halves of a head.
    halves = values.reshape(config[heads], 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add_shape(out: GGUFWriter, config: Mapping[str, int]) -> None:
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(out: GGUFWriter, folder: Path) -> None:
    """The byte-level vocabulary of tokenizer.json, whose texts are split as those of Qwen 2."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    sampling = json.loads((folder / "generation_config.json").read_text("utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for added in tokenizer["added_tokens"]:
        assert tokens[added["id"]] == added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types(kinds)
    out.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    out.add_eos_token_id(tokens.index("<|im_end|>"))
    out.add_pad_token_id(tokens.index("<|endoftext|>"))
    out.add_add_bos_token(False)
    out.add_chat_template((folder / "chat_template.jinja").read_text("utf-8"))
    out.add_sampling_temp(sampling["temperature"])
    out.add_sampling_top_k(sampling["top_k"])
    out.add_sampling_top_p(sampling["top_p"])
