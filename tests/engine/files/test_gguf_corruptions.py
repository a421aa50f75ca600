"""Corruptions of a GGUF model: each is refused by name or is sound for this reader, fast and in little memory.

tests/backends/test_llamacpp_hostile.py loads the accepted ones with llama.cpp.
"""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain, islice

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.gguf import parse_header
from localllm.engine.files.gguf_model import parse_metadata
from localllm.engine.files.gguf_values import HeaderCut

from ... import work
from .gguf_corruptions import (
    ARRAY,
    F32,
    I32,
    TEXT,
    U8,
    VOCABULARIES,
    Case,
    Tensor,
    Value,
    bpe,
    content,
    corruptions,
    numbers,
    plamo2,
    spm,
    tensor_corruptions,
    tensors,
    text,
    u32,
    wpm,
)

STEPS = 400_000  # maximum number of calls and returns of one refusal
MEMORY = 64 * 2**20  # maximum bytes of Python objects of one refusal


def problem_of(file: bytes, size: int | None = None) -> str:
    """The error of a file; empty if it is accepted."""
    try:
        header = parse_header("m.gguf", file, len(file) if size is None else size)
        parse_metadata(header.metadata, "m.gguf")
    except ModelRefused as error:
        return str(error)
    return ""


def all_corruptions() -> Iterator[Case]:
    return chain(*map(corruptions, VOCABULARIES), tensor_corruptions())


def check_bounds(cases: Iterator[Case]) -> tuple[int, int]:
    """Check the work and the memory of each case. Returns the numbers of refused and of accepted files."""
    refused = accepted = 0
    tracemalloc.start()
    try:
        for case in cases:
            file = case.content()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            problem: list[str] = []
            assert work.steps(lambda: problem.append(problem_of(file))) < STEPS, case.title  # noqa: B023
            if problem[0]:
                refused += 1
            else:
                accepted += 1
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY, case.title
    finally:
        tracemalloc.stop()
    return refused, accepted


@pytest.mark.parametrize("name", VOCABULARIES)
def test_sound_model_is_accepted(name: str) -> None:
    assert problem_of(content(VOCABULARIES[name](), tensors())) == ""


def test_corruptions_are_refused_fast_or_accepted() -> None:
    refused, accepted = check_bounds(islice(all_corruptions(), 0, None, 20))
    assert refused > 120
    assert accepted > 120


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_corruptions_are_refused_fast_or_accepted() -> None:
    refused, accepted = check_bounds(all_corruptions())
    assert refused > 3000
    assert accepted > 3000


def with_key(key: str, value: Value, base: Callable[[], dict[str, Value]] = spm) -> bytes:
    return content({**base(), key: value}, tensors())


def with_tensor(name: str, tensor: Tensor) -> bytes:
    return content(spm(), {**tensors(), name: tensor})


def with_tokens(*last: bytes, base: Callable[[], dict[str, Value]] = spm) -> bytes:
    """The model with other texts of its last tokens."""
    metadata = base()
    value = metadata["tokenizer.ggml.tokens"].value
    assert isinstance(value, list)
    tokens = [*value[: len(value) - len(last)], *last]
    return content({**metadata, "tokenizer.ggml.tokens": Value(ARRAY, tokens, TEXT)}, tensors())


def without(*keys: str, base: Callable[[], dict[str, Value]] = spm) -> bytes:
    return content({key: value for key, value in base().items() if key not in keys}, tensors())


# Published vulnerabilities of programs that read GGUF files -> a file of this kind, and the words of its refusal.
PUBLISHED: dict[str, tuple[Callable[[], bytes], str]] = {
    "CVE-2026-7482: a tensor ends after the file": (
        lambda: with_tensor("output_norm.weight", Tensor((2**40,))),
        "starts at byte|ends at byte",
    ),
    "CVE-2026-7482: an offset after the file": (
        lambda: with_tensor("output_norm.weight", Tensor((32,), offset=2**40)),
        "starts at byte 1099511627776 of the data, expected",
    ),
    "CVE-2025-53630: the sizes of all tensors overflow": (
        lambda: content(spm(), {f"t.{index}": Tensor((2**61,)) for index in range(8)}),
        "ends at byte|starts at byte",
    ),
    "CVE-2026-27940: the sizes and the directory overflow": (
        lambda: content(spm(), {"a": Tensor((2**62 - 16,)), "b": Tensor((2**62 - 16,), offset=2**64 - 64)}),
        "ends at byte",
    ),
    "GGML_PAD overflows to 0": (
        lambda: with_tensor("output_norm.weight", Tensor((2**62 - 1,))),
        "ends at byte|starts at byte",
    ),
    "a product of dimensions wraps to 0": (
        lambda: with_tensor("token_embd.weight", Tensor((32, 2**42 + 1, 2**20))),
        "more than 2.63 - 1 values",
    ),
    "CVE-2024-21836: the number of tensors overflows": (
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 2**61, 0) + bytes(64),
        "2305843009213693952 tensors; the limit is",
    ),
    "CVE-2024-23496: the number of entries overflows": (
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(64),
        "1152921504606846976 metadata entries; the limit is",
    ),
    "CVE-2024-21802: an array of an unknown type": (
        lambda: with_key("x", Value(ARRAY, [], 77)),
        "array of the unknown type 77",
    ),
    "CVE-2024-21825: the bytes of an array overflow": (
        lambda: with_key("x", Value(ARRAY, [], U8, count=2**63)),
        "values of 'x'; the limit is",
    ),
    "CVE-2024-23605: the length of a text overflows": (
        lambda: content(spm(), tensors()).replace(
            struct.pack("<Q", 4) + b"tiny", struct.pack("<Q", 2**64 - 1) + b"tiny"
        ),
        "needs 184467",
    ),
    "CVE-2025-49847: a token is longer than its buffer": (lambda: with_tokens(b"x" * 70_000), "70000 bytes; the limit"),
    "a token of PLaMo-2 is a negative byte": (lambda: with_tokens(b"<0x-1>", base=plamo2), "no hexadecimal number"),
    "scores of one byte": (
        lambda: with_key("tokenizer.ggml.scores", numbers([0] * 300, U8)),
        "tokenizer.ggml.scores has a wrong type",
    ),
    "token types of one byte": (
        lambda: with_key("tokenizer.ggml.token_type", numbers([1] * 300, U8)),
        "tokenizer.ggml.token_type has a wrong type",
    ),
    "suppressed tokens of one byte": (
        lambda: with_key("tokenizer.ggml.suppress_tokens", numbers([1] * 3, U8)),
        "tokenizer.ggml.suppress_tokens has a wrong type",
    ),
    "fewer scores than tokens": (
        lambda: with_key("tokenizer.ggml.scores", Value(ARRAY, [0.0] * 299, F32)),
        "scores has 299 values for 300 tokens",
    ),
    "fewer token types than tokens": (
        lambda: with_key("tokenizer.ggml.token_type", numbers([1] * 3, I32)),
        "token_type has 3 values for 300 tokens",
    ),
    "a map of characters without its header": (
        lambda: with_key("tokenizer.ggml.precompiled_charsmap", numbers([1] * 3, U8)),
        "precompiled_charsmap has 3 bytes",
    ),
    "merges are numbers": (lambda: with_key("tokenizer.ggml.merges", numbers([1]), bpe), "merges has a wrong type"),
    "tokens are numbers": (lambda: with_key("tokenizer.ggml.tokens", numbers([1] * 300), bpe), "must be texts"),
    "duplicate tokens": (lambda: with_tokens(b"aa", b"aa"), "tokens are duplicates"),
    "tokens that are equal up to a zero byte": (lambda: with_tokens(b"q\0a", b"q\0b"), "tokens are duplicates"),
    "a vocabulary without a byte": (lambda: without_token(b"<0x0A>"), "no token for the byte 0x0a"),
    "a vocabulary of RWKV without the first byte of a token": (
        lambda: with_tokens(b"\\xc3\\xa4", base=rwkv_without_a_byte),
        "no token for the byte 0xc3",
    ),
    "word pieces with tokens for bytes": (
        lambda: with_key("tokenizer.ggml.token_type", numbers([6] * 300), wpm),
        "cannot have tokens for bytes",
    ),
    "more layers than llama.cpp has": (lambda: with_key("llama.block_count", u32(513)), "integer in 1…512"),
    "more experts than llama.cpp has": (lambda: with_key("llama.expert_count", u32(1025)), "integer in 0…1024"),
    "more experts of a token than experts": (
        lambda: with_key("llama.expert_used_count", u32(1)),
        "expert_used_count must be a number in 0…0",
    ),
    "experts of which a token uses none": (
        lambda: with_key("llama.expert_count", u32(4)),
        "expert_used_count must be a number in 1…4",
    ),
    "an unknown scaling of the rope": (
        lambda: with_key("llama.rope.scaling.type", text("x")),
        "none or linear or yarn",
    ),
    "a negative epsilon": (
        lambda: with_key("llama.attention.layer_norm_rms_epsilon", Value(F32, -1.0)),
        "a number in 0…1",
    ),
    "a text with a zero byte": (lambda: with_key("general.name", text(b"a\0b")), "has a zero byte"),
    "a norm of 16 bits": (
        lambda: with_tensor("output_norm.weight", Tensor((32,), 1)),
        "norms and biases must have F32",
    ),
    "a bias of 8 bits": (lambda: with_tensor("blk.0.attn_q.bias", Tensor((32,), 8)), "norms and biases must have F32"),
    "weights that are integers": (lambda: with_tensor("output.weight", Tensor((32, 300), 26)), "the type I32"),
    "weights of 64 bits": (lambda: with_tensor("output.weight", Tensor((32, 300), 28)), "unknown type 28"),
    "a begin of each text without a token": (
        lambda: without("tokenizer.ggml.bos_token_id", base=VOCABULARIES["gemma4"]),
        "bos_token_id must be a token",
    ),
}


def rwkv_without_a_byte() -> dict[str, Value]:
    metadata = VOCABULARIES["rwkv"]()
    value = metadata["tokenizer.ggml.tokens"].value
    assert isinstance(value, list)
    tokens = [item for item in value if item != b"\\xc3"]
    return {**metadata, "tokenizer.ggml.tokens": Value(ARRAY, tokens, TEXT)}


def without_token(token: bytes) -> bytes:
    metadata = spm()
    value = metadata["tokenizer.ggml.tokens"].value
    assert isinstance(value, list)
    tokens = [b"other" if item == token else item for item in value]
    return content({**metadata, "tokenizer.ggml.tokens": Value(ARRAY, tokens, TEXT)}, tensors())


@pytest.mark.parametrize("title", PUBLISHED)
def test_file_of_a_published_vulnerability_is_refused(title: str) -> None:
    make, words = PUBLISHED[title]
    file = make()
    problems: list[str] = []
    assert work.steps(lambda: problems.append(problem_of(file))) < STEPS
    assert re.search(words, problems[0])
    assert problems[0].startswith("m.gguf")


def test_token_of_two_gigabytes_is_refused_before_it_is_read() -> None:
    """CVE-2025-49847. The file has a hole in the place of the token."""
    head = with_tokens(b"")[:2000] + bytes(2000)
    start = head.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4 + 4 + 8
    head = head[:start] + struct.pack("<Q", 2**31 + 8) + head[start + 8 :]
    with pytest.raises((ModelRefused, HeaderCut)) as refused:
        parse_header("m.gguf", head, 2**33)
    assert not isinstance(refused.value, HeaderCut)
    assert "the limit is" in str(refused.value)
