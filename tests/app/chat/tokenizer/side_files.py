"""Model folders with every kind of side file that a tokenizer has, made at random; and texts for them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from .vocabularies import KINDS, SPECIAL, make_text

# Tokens that tokenizer.json may have, and tokens that only side files have.
STORED = ["<|end|>", "<|tool|>", "<|pad|>", "[INST]"]
NEW = ["<|im_end|>", "<tool_call>", "<｜User｜>", "word", "[PAD]", "<|endoftext|>", "<image>", "▁<PRE>", "the"]
NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"]
OWN_NAMES = ["image_token", "eot_token", "prefix_token"]
CLASSES = [
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizerFast",
    "GPT2TokenizerFast",
    "CodeGenTokenizer",
    "GPTNeoXTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "Qwen3_5Tokenizer",
    "GemmaTokenizerFast",
    "CohereTokenizerFast",
    "BloomTokenizerFast",
    "SomeTokenizerThatNobodyHas",
]
MODELS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "cohere2", "deepseek_v3", "gpt_neox"]
MODELS += [
    "starcoder2",
    "granite",
    "olmo2",
    "smollm3",
    "glm4",
    "mixtral",
    "phi",
    "code_llama",
    "qwen3_5_text",
    "internlm2",
]
BASES = ["byte level", "llama", "llama, metaspace", "gemma"]


@cache
def base(kind: str) -> str:
    """tokenizer.json without added tokens other than <unk>, <s>, </s>."""
    tokenizer = KINDS[kind.partition(",")[0]]()
    if kind == "llama, metaspace":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    value = json.loads(tokenizer.to_str())
    # transformers decodes added tokens such as `ü` to wrong bytes, unlike localllm: see test_huggingface.py
    value["added_tokens"] = [entry for entry in value["added_tokens"] if entry["content"] in SPECIAL]
    return json.dumps(value)


def flags(chance: random.Random) -> dict[str, bool]:
    names = ["lstrip", "rstrip", "normalized", "single_word", "special"]
    return {name: chance.random() < 0.3 for name in names}


def token(chance: random.Random, *, typed: bool = False) -> dict[str, Any]:
    value = {"content": chance.choice([*STORED, *NEW]), **flags(chance)}
    return {"__type": "AddedToken", **value} if typed else value


def _value(chance: random.Random) -> Any:
    """A special token as tokenizer_config.json has it."""
    return chance.choice([chance.choice([*STORED, *NEW, "<s>", "</s>"]), token(chance, typed=True), None])


def _table(chance: random.Random, tokenizer: Tokenizer) -> dict[str, Any]:
    """added_tokens_decoder: the tokens of tokenizer.json, some with other flags, and new ones."""
    table = {}
    for index, entry in tokenizer.get_added_tokens_decoder().items():
        if chance.random() < 0.8:
            own = {name: getattr(entry, name) for name in ("lstrip", "rstrip", "normalized", "single_word", "special")}
            table[str(index)] = {"content": entry.content, **(flags(chance) if chance.random() < 0.4 else own)}
    size = tokenizer.get_vocab_size()
    new = chance.sample(NEW, chance.randint(0, 4))
    table |= {str(size + index): {"content": text, **flags(chance)} for index, text in enumerate(new)}
    return table


def _config(chance: random.Random, tokenizer: Tokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {name: _value(chance) for name in NAMES if chance.random() < 0.4}
    config |= {name: chance.choice(NEW) for name in OWN_NAMES if chance.random() < 0.1}
    if chance.random() < 0.8:
        config["tokenizer_class"] = chance.choice(CLASSES)
    for name in ("add_prefix_space", "legacy", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"):
        if chance.random() < 0.3:
            config[name] = chance.choice([True, False])
    if chance.random() < 0.1:
        config["split_special_tokens"] = True
    if chance.random() < 0.5:
        config["added_tokens_decoder"] = _table(chance, tokenizer)
    if chance.random() < 0.3:
        config["additional_special_tokens"] = chance.choice(
            [[], chance.sample([*STORED, *NEW], 3), [token(chance, typed=True)], None]
        )
    if chance.random() < 0.3:
        config["extra_special_tokens"] = chance.choice(
            [{}, [], chance.sample([*STORED, *NEW], 2), {"video_token": chance.choice(NEW), "eos_token": "<|end|>"}]
        )
    if chance.random() < 0.05:
        config["auto_map"] = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    return config


def _special_map(chance: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in NAMES:
        if chance.random() < 0.4:
            values[name] = chance.choice([chance.choice([*STORED, *NEW]), token(chance)])
    if chance.random() < 0.4:
        values[chance.choice(["additional_special_tokens", "extra_special_tokens"])] = chance.sample(NEW, 2)
    return values


def write_folder(folder: Path, chance: random.Random) -> str:
    """Write a random model folder; the kind of its tokenizer.json."""
    folder.mkdir(parents=True)
    kind = chance.choice(BASES)
    tokenizer = Tokenizer.from_str(base(kind))
    stored = chance.sample(STORED, chance.randint(0, 3))
    tokenizer.add_tokens([AddedToken(text, **flags(chance)) for text in stored])
    if chance.random() < 0.3:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    if chance.random() < 0.1:
        tokenizer.enable_padding(pad_token="<|pad|>")
        tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {"config.json": {"model_type": chance.choice(MODELS)}}
    if chance.random() < 0.95:
        files["tokenizer_config.json"] = _config(chance, tokenizer)
    if chance.random() < 0.4:
        files["special_tokens_map.json"] = _special_map(chance)
    if chance.random() < 0.3:
        size = tokenizer.get_vocab_size()
        new = chance.sample([*NEW, "<|end|>"], 3)
        files["added_tokens.json"] = {text: size + index for index, text in enumerate(new)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return kind


def side_text(chance: random.Random) -> str:
    """A text full of special tokens, with spaces around them."""
    segments = []
    for _ in range(chance.randint(1, 5)):
        spaces = [chance.choice(["", "", " ", "  ", "\n", "\t", "\u00a0"]) for _ in range(2)]
        segments += [make_text(chance), spaces[0], chance.choice([*STORED, *NEW, "<s>", "</s>", "<unk>"]), spaces[1]]
        segments.append(chance.choice(["", "the quick", "1234 5", ", isn't", "e\u0301"]))
    return "".join(segments)
