"""Checks the vocabulary in the metadata of a GGUF file.

llama.cpp ends its process for some of these vocabularies: it asserts, or throws an exception through its C interface.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from .gguf_values import FLOAT32, INT8, INT32, STRING, TOKENS, UINT8, Array, Value

MAX_TOKEN = 4096  # bytes; llama.cpp recurses once for each byte of a token

# Tokenizer -> the ids that llama.cpp uses if the file has no valid ones: beginning and end of a sequence. None: no id.
_DEFAULT_IDS: Mapping[str, tuple[int | None, int | None]] = MappingProxyType(
    {
        "llama": (1, 2),
        "gpt2": (11, 11),
        "hybriddna": (11, 11),
        "whitespace": (11, 11),
        "plamo2": (1, 2),
        "t5": (None, 1),
        "bert": (101, None),
    }
)
# Array of the vocabulary -> the types of its items.
_ARRAYS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "scores": (FLOAT32, INT32),
        "token_type": (INT32,),
        "merges": (STRING,),
        "suppress_tokens": (INT32,),
        "precompiled_charsmap": (UINT8, INT8),
    }
)
_FOR_EACH_TOKEN = ("scores", "token_type")
_BYTE_TYPE = 6  # the type of tokens that are one byte
_BYTE = re.compile(rb"<0x..>", re.DOTALL)
_HEX_BYTE = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
_PLAIN = ("", "default", "gpt-2")  # values of tokenizer.ggml.pre with which a BPE tokenizer adds no token
_ESCAPES: Mapping[int, int] = MappingProxyType({ord("t"): 9, ord("n"): 10, ord("r"): 13})  # of RWKV


def problem_of_texts(texts: list[bytes]) -> str:
    """The first problem of the texts of tokens; empty if there is none."""
    longest = max(map(len, texts), default=0)
    if longest > MAX_TOKEN:
        return f"a token has {longest} bytes; the limit is {MAX_TOKEN}"
    # llama.cpp ends a text at its first zero byte, and gives an empty token a name.
    names = {text.partition(b"\0")[0] or b"[EMPTY_%d]" % token for token, text in enumerate(texts)}
    if len(names) < len(texts):
        return f"{len(texts) - len(names)} of its {len(texts)} tokens are duplicates"
    return ""


def problem_of_vocabulary(metadata: Mapping[str, Value], texts: Collection[bytes], types: Collection[int]) -> str:
    """The first problem of the vocabulary; empty if there is none. `texts`, `types`: those of the tokens."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get(TOKENS)
    if tokens is None or not isinstance(model, str):  # llama.cpp reads no vocabulary without its model
        return ""
    if not isinstance(tokens, Array) or tokens.kind != STRING:
        return f"{TOKENS} must be texts"
    if problem := _problem_of_arrays(metadata, tokens.count):
        return problem
    problem_of = _PROBLEMS.get(model)
    problem = problem_of(texts, types) if problem_of else ""
    return problem or _problem_of_added(metadata, model, len(texts))


def _problem_of_arrays(metadata: Mapping[str, Value], count: int) -> str:
    """The arrays of the vocabulary must have the types that llama.cpp reads, and a value for each of `count` tokens."""
    for key, kinds in _ARRAYS.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        if not isinstance(value, Array) or value.kind not in kinds:
            return f"tokenizer.ggml.{key} has a wrong type"
        if key in _FOR_EACH_TOKEN and value.count < count:
            return f"tokenizer.ggml.{key} has {value.count} values for {count} tokens"
        if key == "precompiled_charsmap" and value.count <= 4:
            return f"tokenizer.ggml.{key} has {value.count} bytes, fewer than its header"
    return ""


def _missing_byte(texts: Collection[bytes], types: Collection[int]) -> str:
    """A text of any bytes must have tokens."""
    for byte in range(256):
        if b"<0x%02X>" % byte not in texts and (byte == 0 or bytes([byte]) not in texts):
            return f"its vocabulary has no token for the byte {byte:#04x}"
    return ""


def _missing_beginning(texts: Collection[bytes], types: Collection[int]) -> str:
    """The first byte of each token of RWKV must be a token too: otherwise llama.cpp tokenizes some texts forever."""
    tokens = [_unescaped(text) for text in texts]
    single = {token for token in tokens if len(token) == 1}
    missing = sorted({token[:1] for token in tokens if token} - single)
    return f"its vocabulary has no token for the byte {missing[0][0]:#04x}" if missing else ""


def _wrong_byte(texts: Collection[bytes], types: Collection[int]) -> str:
    is_wrong = any(_BYTE.fullmatch(text) and not _HEX_BYTE.fullmatch(text) for text in texts)
    return "one of its byte tokens is no hexadecimal number" if is_wrong else ""


def _byte_token(texts: Collection[bytes], types: Collection[int]) -> str:
    return "its tokenizer bert cannot have tokens for bytes" if _BYTE_TYPE in types else ""


# Tokenizer -> the check of the texts and types of its tokens.
_PROBLEMS: Mapping[str, Callable[[Collection[bytes], Collection[int]], str]] = MappingProxyType(
    {"llama": _missing_byte, "rwkv": _missing_beginning, "plamo2": _wrong_byte, "bert": _byte_token}
)


def _unescaped(text: bytes) -> bytes:
    """The bytes of a token of RWKV, as llama.cpp reads them: it has escapes as C, `\\xNN` among them."""
    if b"\\" not in text:
        return text
    output = bytearray()
    position = 0
    while position < len(text):
        byte = text[position]
        position += 1
        if byte != ord("\\"):
            output.append(byte)
        elif text[position : position + 1] == b"x":
            output += _number(text[position + 1 : position + 3])
            position += 3
        elif position < len(text):
            output.append(_ESCAPES.get(text[position], text[position]))
            position += 1
    return bytes(output)


def _number(digits: bytes) -> bytes:
    """The byte of two hexadecimal digits, which llama.cpp does not check; empty if one is missing."""
    if len(digits) < 2:
        return b""
    high, low = (digit - ord("a") + 10 if digit >= ord("a") else digit - ord("0") for digit in digits)
    return bytes([(high * 16 + low) % 256])


def _problem_of_added(metadata: Mapping[str, Value], model: str, count: int) -> str:
    """The tokens that a tokenizer adds to each text must be in the vocabulary."""
    begin, end = _DEFAULT_IDS.get(model, (None, None))
    adds_separator = model == "bert" and metadata.get("tokenizer.ggml.add_sep_token") is not False
    adds_end = metadata.get("tokenizer.ggml.add_eos_token", model == "t5")
    for is_added, key, default in (
        (_adds_begin(metadata, model), "bos_token_id", begin),
        (adds_separator, "seperator_token_id", 102),
        (adds_end, "eos_token_id", end),
    ):
        if is_added and not _has_token(metadata, key, default, count):
            return f"tokenizer.ggml.{key} must be a token of the vocabulary"
    return ""


def _adds_begin(metadata: Mapping[str, Value], model: str) -> bool:
    if model == "gemma4":  # whatever the metadata say
        return True
    adds = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(adds, bool):
        return adds
    if model == "gpt2":
        return metadata.get("tokenizer.ggml.pre", "") not in _PLAIN
    return model in ("llama", "plamo2", "bert")


def _has_token(metadata: Mapping[str, Value], key: str, default: int | None, count: int) -> bool:
    """Whether the id in the metadata, or the default id in its place, is a token."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    return any(type(token) is int and 0 <= token < count for token in (value, default))
