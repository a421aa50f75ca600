"""A tiny GGUF model that llama.cpp loads, and its corruptions: each changes one thing in the header or the metadata."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from localllm.engine.files.gguf import TYPES

ALIGNMENT = 32
MAX_DATA = 2**22  # bytes of a tensor
HIDDEN = 32
HEADS = 4
WIDTH = 64  # of the feed-forward network
VOCAB = 300

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the metadata. `item`: the type of the items of an array."""

    kind: int
    value: object
    item: int = 0
    count: int | None = None  # the number of items in the file; None: the real number

    def packed(self) -> bytes:
        if self.kind != ARRAY:
            return struct.pack("<I", self.kind) + _packed(self.kind, self.value)
        assert isinstance(self.value, list)
        count = len(self.value) if self.count is None else self.count
        return struct.pack("<IIQ", ARRAY, self.item, count) + b"".join(_packed(self.item, item) for item in self.value)


def _packed(kind: int, value: object) -> bytes:
    if kind == TEXT:
        assert isinstance(value, bytes)
        return struct.pack("<Q", len(value)) + value
    form = FORMS[kind]
    if isinstance(value, int) and form not in "fd":
        bits = 8 * struct.calcsize(form)
        value = (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) if form.islower() else value % (1 << bits)
    return struct.pack(f"<{form}", value)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An entry of the directory. The data is zero but for some bytes of each kilobyte."""

    shape: tuple[int, ...]
    kind: int = 0  # F32
    offset: int | None = None  # None: after the tensor before it

    @property
    def num_bytes(self) -> int:
        """Bytes of the data in the file: those of a sound tensor, or few bytes if a sound file would be too large."""
        _, block_values, block_bytes = TYPES.get(self.kind, ("", 1, 4))
        total = math.prod(self.shape) * block_bytes // block_values
        return total if total < MAX_DATA else 64


Metadata = Mapping[str, Value]
Tensors = Mapping[str, Tensor]


def byte_names() -> list[str]:
    """The names that the vocabulary of GPT-2 has for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def texts(values: list[str]) -> Value:
    return Value(ARRAY, [value.encode() for value in values], TEXT)


def numbers(values: list[int], kind: int = I32) -> Value:
    return Value(ARRAY, values, kind)


def u32(value: int) -> Value:
    return Value(U32, value)


def text(value: str | bytes) -> Value:
    return Value(TEXT, value.encode() if isinstance(value, str) else value)


def _shape() -> dict[str, Value]:
    return {
        "general.architecture": text("llama"),
        "general.name": text("tiny"),
        "general.alignment": u32(ALIGNMENT),
        "llama.context_length": u32(128),
        "llama.embedding_length": u32(HIDDEN),
        "llama.block_count": u32(1),
        "llama.feed_forward_length": u32(WIDTH),
        "llama.attention.head_count": u32(HEADS),
        "llama.attention.head_count_kv": u32(2),
        "llama.attention.layer_norm_rms_epsilon": Value(F32, 1e-5),
        "llama.rope.dimension_count": u32(HIDDEN // HEADS),
        "llama.rope.freq_base": Value(F32, 10000.0),
        "llama.rope.scaling.type": text("linear"),
        "llama.rope.scaling.factor": Value(F32, 2.0),
        "llama.rope.scaling.original_context_length": u32(64),
        "llama.vocab_size": u32(VOCAB),
    }


def bpe() -> dict[str, Value]:
    """The metadata of a model with a vocabulary of byte pairs."""
    tokens = byte_names() + [chr(97 + index % 26) + chr(97 + index // 26) for index in range(VOCAB - 256 - 4)]
    tokens += ["<s>", "</s>", "<unk>", "<pad>"]
    merges = [f"{token[0]} {token[1]}" for token in tokens[256:-4]]
    kinds = [1] * (VOCAB - 4) + [3, 3, 2, 3]
    return {
        **_shape(),
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.token_type": numbers(kinds),
        "tokenizer.ggml.merges": texts(merges),
        "tokenizer.ggml.bos_token_id": u32(VOCAB - 4),
        "tokenizer.ggml.eos_token_id": u32(VOCAB - 3),
        "tokenizer.ggml.unknown_token_id": u32(VOCAB - 2),
        "tokenizer.ggml.padding_token_id": u32(VOCAB - 1),
        "tokenizer.ggml.add_bos_token": Value(BOOL, 1),
        "tokenizer.chat_template": text("{% for m in messages %}{{ m.content }}{% endfor %}"),
    }


def spm() -> dict[str, Value]:
    """The metadata of a model with a vocabulary of SentencePiece."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [chr(97 + index % 26) * (1 + index // 26) for index in range(VOCAB - len(tokens))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259)
    scores = Value(ARRAY, [-float(index) for index in range(VOCAB)], F32)
    return {
        **_shape(),
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": numbers(kinds),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(0),
        "tokenizer.ggml.add_space_prefix": Value(BOOL, 1),
    }


def wpm() -> dict[str, Value]:
    """The metadata of a model with a vocabulary of word pieces."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += [f"▁{chr(97 + index % 26)}{index}" for index in range(VOCAB - len(tokens))]
    return {
        **_shape(),
        "tokenizer.ggml.model": text("bert"),
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.token_type": numbers([3] * 5 + [1] * (VOCAB - 5)),
        "tokenizer.ggml.token_type_count": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(1),
        "tokenizer.ggml.seperator_token_id": u32(3),
        "tokenizer.ggml.cls_token_id": u32(2),
    }


def ugm() -> dict[str, Value]:
    """The metadata of a model with a unigram vocabulary and a map of characters."""
    values = spm()
    values["tokenizer.ggml.model"] = text("t5")
    # A map: bytes of the trie, the trie, then texts of the replacements.
    trie = struct.pack("<256I", *[0] * 256)
    charsmap = struct.pack("<I", len(trie)) + trie + b"a\0b\0"
    values["tokenizer.ggml.precompiled_charsmap"] = numbers(list(charsmap), U8)
    values["tokenizer.ggml.remove_extra_whitespaces"] = Value(BOOL, 1)
    return values


def rwkv() -> dict[str, Value]:
    values = _shape()
    tokens = [b"<s>", *(b"\\x%02x" % byte for byte in range(256))]
    tokens += [b"w%d" % index for index in range(VOCAB - len(tokens))]
    values["tokenizer.ggml.model"] = text("rwkv")
    values["tokenizer.ggml.tokens"] = Value(ARRAY, tokens, TEXT)
    return values


def gemma4() -> dict[str, Value]:
    return {**bpe(), "tokenizer.ggml.model": text("gemma4")}


def plamo2() -> dict[str, Value]:
    """The metadata of a model with the vocabulary of PLaMo-2: as SentencePiece, without its first token."""
    values = spm()
    values["tokenizer.ggml.model"] = text("plamo2")
    return values


VOCABULARIES: Mapping[str, Callable[[], dict[str, Value]]] = MappingProxyType(
    {"bpe": bpe, "spm": spm, "wpm": wpm, "ugm": ugm, "rwkv": rwkv, "gemma4": gemma4, "plamo2": plamo2}
)


def tensors() -> dict[str, Tensor]:
    """The tensors of the model, of one layer."""
    keys = HIDDEN // HEADS * 2
    return {
        "token_embd.weight": Tensor((HIDDEN, VOCAB)),
        "output_norm.weight": Tensor((HIDDEN,)),
        "output.weight": Tensor((HIDDEN, VOCAB)),
        "blk.0.attn_norm.weight": Tensor((HIDDEN,)),
        "blk.0.attn_q.weight": Tensor((HIDDEN, HIDDEN)),
        "blk.0.attn_k.weight": Tensor((HIDDEN, keys)),
        "blk.0.attn_v.weight": Tensor((HIDDEN, keys)),
        "blk.0.attn_output.weight": Tensor((HIDDEN, HIDDEN)),
        "blk.0.ffn_norm.weight": Tensor((HIDDEN,)),
        "blk.0.ffn_gate.weight": Tensor((HIDDEN, WIDTH)),
        "blk.0.ffn_up.weight": Tensor((HIDDEN, WIDTH)),
        "blk.0.ffn_down.weight": Tensor((WIDTH, HIDDEN)),
    }


def content(metadata: Metadata, entries: Tensors) -> bytes:
    """The file."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(metadata))
    for key, value in metadata.items():
        header += struct.pack("<Q", len(key.encode())) + key.encode() + value.packed()
    end = 0
    for name, tensor in entries.items():
        offset = end if tensor.offset is None else tensor.offset
        header += struct.pack("<Q", len(name.encode())) + name.encode()
        header += struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += struct.pack("<IQ", tensor.kind, offset % 2**64)
        end += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
    return header + bytes(-len(header) % ALIGNMENT) + _data(end)


def _data(length: int) -> bytes:
    block = struct.pack("<8f", *(0.01 * (index - 3) for index in range(8)))
    return (block * (length // len(block) + 1))[:length]


@dataclass(frozen=True, slots=True)
class Case:
    """A corruption. The file is made only when a test needs it."""

    title: str
    metadata: Metadata
    entries: Tensors

    def content(self) -> bytes:
        return content(self.metadata, self.entries)


# Other values for a number of each type: zero, the ends of its range, sizes whose products overflow.
NUMBERS = (0, 1, 2, 3, 6, -1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (b"", b"\0", b"llama\0", b"x" * 70_000, b"\xff\xfe", b"none", b"bert", b"t5", b"mamba", b"../../etc", b"%s%n")


def corruptions(name: str) -> Iterator[Case]:
    """Each corruption of the model with one of VOCABULARIES."""
    metadata = VOCABULARIES[name]()
    entries = tensors()
    for key, value in metadata.items():
        yield Case(f"{name}: without {key}", _without(metadata, key), entries)
        for title, other in _other_values(value):
            yield Case(f"{name}: {key} {title}", {**metadata, key: other}, entries)
    for key, other in _more_entries():
        yield Case(f"{name}: {key} = {other.value!r:.30}", {**metadata, key: other}, entries)


def tensor_corruptions() -> Iterator[Case]:
    """Each corruption of the directory of the model."""
    metadata = spm()
    entries = tensors()
    for key, tensor in entries.items():
        yield Case(f"without {key}", metadata, _without(entries, key))
        for title, other in _other_tensors(tensor):
            yield Case(f"{key} {title}", metadata, {**entries, key: other})
        renamed = {("blk.0.x" if name == key else name): value for name, value in entries.items()}
        yield Case(f"{key} has another name", metadata, renamed)
    for extra in ("blk.1.attn_norm.weight", "blk.0.attn_q.bias", "rope_freqs.weight", "blk.999999.x", "blk.-1.x"):
        yield Case(f"extra tensor {extra}", metadata, {**entries, extra: Tensor((8,))})
    for first, second in pairwise(entries):
        swapped = {**entries, first: entries[second], second: entries[first]}
        yield Case(f"{first} and {second} swapped", metadata, swapped)


def _without(values: Mapping[str, object], key: str) -> dict:
    return {name: value for name, value in values.items() if name != key}


def _other_values(value: Value) -> Iterator[tuple[str, Value]]:
    """Other values of the same type, and values of other types."""
    if value.kind == ARRAY:
        yield from _other_arrays(value)
    elif value.kind == TEXT:
        for other in TEXTS:
            yield f"= {other!r:.20}", Value(TEXT, other)
    elif value.kind == F32:
        for number in FLOATS:
            yield f"= {number}", Value(F32, number)
    else:
        for kind in (value.kind, U64, I32):
            for other_number in NUMBERS:
                yield f"= {other_number} as {kind}", Value(kind, other_number)
    for other_type in (Value(U32, 7), Value(TEXT, b"7"), Value(F32, 7.0), numbers([7]), texts(["7"]), Value(BOOL, 1)):
        if (other_type.kind, other_type.item) != (value.kind, value.item):
            yield f"of type {other_type.kind}/{other_type.item}", other_type


def _other_arrays(value: Value) -> Iterator[tuple[str, Value]]:
    assert isinstance(value.value, list)
    items = value.value
    for title, other in {
        "empty": [],
        "of one item": items[:1],
        "without its last item": items[:-1],
        "with one item more": [*items, items[-1]],
        "twice as long": items * 2,
        "of equal items": items[:1] * len(items),
    }.items():
        yield title, replace(value, value=other)
    if value.item == TEXT:
        for item in (b"", b" ", b"\xff", b"\0", b"x" * 70_000, b"a b c d", b"\xe2\x96\x81"):
            yield f"with {item!r:.20} at the end", replace(value, value=[*items[:-1], item])
            yield f"of {item!r:.20}", replace(value, value=[item] * min(len(items), 300 if len(item) < 99 else 2))
        return
    for number in FLOATS if value.item == F32 else NUMBERS:
        yield f"of {number}", replace(value, value=[number] * len(items))
        yield f"with {number} at the end", replace(value, value=[*items[:-1], number])
    for kind in (U8, I8, I32, U32, F32, U64):
        if kind != value.item:
            as_float = kind == F32
            yield f"of type {kind}", replace(value, item=kind, value=[float(x) if as_float else int(x) for x in items])


def _more_entries() -> Iterator[tuple[str, Value]]:
    """Entries that the model does not have."""
    for key in (
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.attention.sliding_window",
        "llama.expert_count",
        "llama.expert_used_count",
        "llama.tensor_data_layout",
        "llama.pooling_type",
        "llama.attention.causal",
        "llama.leading_dense_block_count",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
        "tokenizer.ggml.fim_pre_token_id",
        "tokenizer.ggml.mask_token_id",
        "tokenizer.ggml.seperator_token_id",
        "tokenizer.ggml.cls_token_id",
        "split.count",
        "split.no",
        "split.tensors.count",
        "general.file_type",
        "general.quantization_version",
    ):
        for number in NUMBERS:
            yield key, u32(number)
        yield key, text("x")
    for key in ("tokenizer.ggml.precompiled_charsmap",):
        for raw in ([], [255] * 3, [255] * 8, [0, 0, 0, 0], [16, 0, 0, 0], [4, 0, 0, 0, 255, 255, 255, 255, 97]):
            yield key, numbers(raw, U8)
    for key in ("llama.attention.head_count", "llama.attention.head_count_kv", "llama.feed_forward_length"):
        for count in ([], [0], [-1], [4, 4], [4] * 600):
            yield key, numbers(count)
    yield "general.type", text("adapter")
    yield "general.type", text("mmproj")
    yield "tokenizer.ggml.token_type", numbers([])
    yield "tokenizer.ggml.scores", Value(ARRAY, [], F32)
    yield "tokenizer.ggml.merges", texts([])
    yield "tokenizer.ggml.merges", texts(["a"] * 10)
    yield "tokenizer.ggml.suppress_tokens", numbers([-1, 2**31 - 1])


def _other_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    shape = tensor.shape
    for index in range(len(shape)):
        length = shape[index]
        for number in (0, 1, length - 1, length + 1, length * 2, 2**31, 2**32, 2**62, 2**63, 2**64 - 1):
            yield f"dimension {index} = {number}", replace(tensor, shape=(*shape[:index], number, *shape[index + 1 :]))
    yield "transposed", replace(tensor, shape=shape[::-1])
    yield "of no dimension", replace(tensor, shape=())
    yield "of one dimension more", replace(tensor, shape=(*shape, 1))
    yield "of five dimensions", replace(tensor, shape=(*shape, 1, 1, 1, 1)[:5])
    for kind in (1, 2, 8, 9, 12, 15, 24, 26, 27, 28, 30, 39, 4, 31, 99, 2**31):
        yield f"of type {kind}", replace(tensor, kind=kind)
    for offset in (1, 32, 2**31, 2**62, 2**63, -1, -32):
        yield f"at {offset}", replace(tensor, offset=offset)
