"""Small GGUF vocabularies, one for each kind that llama.cpp knows, and the tokenizers that must give equal ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from localllm.app.chat.tokenizer import gguf
from localllm.app.chat.tokenizer.gguf import GgufTokenizer
from localllm.app.paths import guide_dir
from localllm.engine.files.model_files import read_model
from tests.engine.files.gguf_files import TINY, model

from .vocabularies import BYTES, KINDS, SPECIAL

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
THINK = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
Reference = Callable[[str], list[int]]

# Name of the splitting of words in llama.cpp -> the regular expression in the tokenizer.json of these models.
WORDS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@dataclass(frozen=True)
class Pair:
    """A vocabulary in a GGUF file, and the ids that it must give."""

    tokenizer: GgufTokenizer
    reference: Reference


def open_tokenizer(file: Path, metadata: dict[str, Any]) -> GgufTokenizer:
    """The tokenizer of a file that is written with this metadata."""
    file.write_bytes(model(TINY | metadata))
    return gguf.open_tokenizer(read_model(file))


def vocabulary_keys(kind: str, tokens: Sequence[str], types: Sequence[int], **more: Any) -> dict[str, Any]:
    """The metadata of a vocabulary. `more`: key after "tokenizer.ggml." -> value."""
    keys = {"model": kind, "tokens": list(tokens), "token_type": list(types), **more}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def byte_level(words: str, file: Path) -> Pair:
    """The vocabulary of guide with another splitting of words. Token 0 is special, token 3 is <tool_call>."""
    value = json.loads((guide_dir() / "tokenizer.json").read_text("utf-8"))
    tokens = sorted(value["model"]["vocab"], key=value["model"]["vocab"].get)
    types = [NORMAL] * len(tokens)
    for entry in value["added_tokens"]:
        types[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    merges = [" ".join(merge) for merge in value["model"]["merges"]]
    rust = Tokenizer.from_str(json.dumps(value | {"normalizer": None}))
    split = pre_tokenizers.Split(Regex(WORDS[words]), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    rust.model.ignore_merges = words in ("llama-bpe", "tekken")  # as in the files of these models
    keys = vocabulary_keys("gpt2", tokens, types, pre=words, merges=merges, eos_token_id=2, padding_token_id=0)
    return Pair(open_tokenizer(file, keys), lambda text: rust.encode(text, add_special_tokens=False).ids)


def sentencepiece(file: Path, *, prefix: bool, strips: bool = False) -> Pair:
    """A vocabulary like that of Llama 2 (with a space before the text) and Gemma. It merges tokens by score; other
    characters become bytes.

    `strips`: white space after most added tokens belongs to them, as for Phi 3.
    """
    rust = KINDS["llama" if prefix else "gemma"]()
    vocab = rust.get_vocab(with_added_tokens=True)
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|endoftext|>", *THINK]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 264), CONTROL, *[USER_DEFINED] * 4]
    scores = [-float(index) for index in range(len(tokens))]
    rust.model = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        _all_merges(tokens[259:-5]),
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    rust.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    rust.add_special_tokens([AddedToken("</s>", normalized=False, rstrip=strips)])
    rust.add_tokens([AddedToken(text, normalized=False, rstrip=strips) for text in THINK])
    keys = vocabulary_keys(
        "llama", tokens, types, scores=scores, add_space_prefix=prefix, eos_token_id=2, bos_token_id=1
    )
    if strips:
        keys["general.name"] = "Phi-3"  # llama.cpp knows these tokens only by the name
    return Pair(open_tokenizer(file, keys), lambda text: rust.encode(text, add_special_tokens=False).ids)


def _all_merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Every pair of tokens whose text is a token, in the order of the tokens."""
    known = set(tokens)
    merges = []
    for token in tokens:
        pairs = ((token[:index], token[index:]) for index in range(1, len(token)))
        merges += [pair for pair in pairs if known.issuperset(pair)]
    return merges


def unigram(file: Path) -> Pair:
    """A vocabulary like that of T5: the tokenizer selects the most probable split."""
    rust = KINDS["metaspace"]()
    # Sentencepiece writes a space before every text; Metaspace only before a text that begins with another character.
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    value = [(text, float(np.float32(score))) for text, score in json.loads(rust.to_str())["model"]["vocab"]]
    rust.model = models.Unigram(value, unk_id=0)
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(value) - 3)]
    keys = vocabulary_keys(
        "t5",
        [text for text, _ in value],
        types,
        scores=[score for _, score in value],
        add_space_prefix=True,
        remove_extra_whitespaces=False,
        escape_whitespaces=True,
        eos_token_id=2,
        bos_token_id=1,
        unknown_token_id=0,
    )
    return Pair(open_tokenizer(file, keys), lambda text: rust.encode(text, add_special_tokens=False).ids)


def word_piece(file: Path) -> Pair:
    """A vocabulary like that of BERT."""
    rust = KINDS["wordpiece"]()
    vocab = {token: index for token, index in rust.get_vocab().items() if not {"▁", "\0"} & set(token)}
    tokens = sorted(vocab, key=vocab.__getitem__)
    rust.model = models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="<unk>")
    spelled = [text.removeprefix("##") if text.startswith("##") else f"▁{text}" for text in tokens[3:]]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)]
    keys = vocabulary_keys(
        "bert",
        [*SPECIAL, *spelled],
        types,
        unknown_token_id=0,
        bos_token_id=1,
        seperator_token_id=2,
        eos_token_id=2,
        padding_token_id=0,
    )
    return Pair(open_tokenizer(file, keys), lambda text: rust.encode(text, add_special_tokens=False).ids)


def rwkv(file: Path) -> Pair:
    """A vocabulary like that of RWKV: the tokenizer always takes the longest token."""
    words = [" the", "the", "fox", " ", "  ", "\n\n", "é", "日本", "<s", "👍🏽", "Пр"]
    plain = [bytes([byte]) for byte in range(256)]
    plain += [word.encode() for word in words if len(word.encode()) > 1]
    tokens = ["<s>", *map(_rwkv_text, plain)]
    keys = vocabulary_keys("rwkv", tokens, [CONTROL, *[NORMAL] * len(plain)], eos_token_id=0)
    ids = {data: index for index, data in enumerate(plain, start=1)}

    def reference(text: str) -> list[int]:
        segments = re.split("(<s>)", text)
        return [token for segment in segments for token in ([0] if segment == "<s>" else longest(segment.encode()))]

    def longest(data: bytes) -> list[int]:
        if not data:
            return []
        token = max((token for token in ids if data.startswith(token)), key=len)
        return [ids[token], *longest(data[len(token) :])]

    return Pair(open_tokenizer(file, keys), reference)


def _rwkv_text(data: bytes) -> str:
    """The spelling of bytes in the vocabulary of RWKV."""
    return "".join(f"\\x{byte:02x}" if not 32 < byte < 127 or byte == ord("\\") else chr(byte) for byte in data)


def plamo(file: Path) -> Pair:
    """A vocabulary like that of PLaMo 2. The library `tokenizers` has no such tokenizer: the ids are those of
    llama.cpp."""
    words = ["the", " the", "quick", "日本", "é", "👍🏽", " ", "a", "b"]
    tokens = ["<unk>", "<s>", "</s>", "<pad>", *BYTES, *words, *THINK]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), *[USER_DEFINED] * 4]
    scores = [-float(index) for index in range(len(tokens))]
    tokenizer = open_tokenizer(file, vocabulary_keys("plamo2", tokens, types, scores=scores))
    return Pair(tokenizer, lambda text: tokenizer.encode(text, add_special_tokens=False))


KINDS_OF_GGUF: dict[str, Callable[[Path], Pair]] = {
    **{words: lambda file, words=words: byte_level(words, file) for words in WORDS},  # type: ignore[misc]
    "llama": lambda file: sentencepiece(file, prefix=True),
    "gemma": lambda file: sentencepiece(file, prefix=False),
    "phi-3": lambda file: sentencepiece(file, prefix=True, strips=True),
    "t5": unigram,
    "bert": word_piece,
    "rwkv": rwkv,
    "plamo2": plamo,
}


@cache
def pair(kind: str, folder: Path) -> Pair:
    """The vocabulary of this kind. The first call writes its file to the folder."""
    return KINDS_OF_GGUF[kind](folder / f"{kind}.gguf")
