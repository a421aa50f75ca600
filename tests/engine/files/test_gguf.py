"""Damaged and hostile GGUF headers: each is refused by name, fast, and without much memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.gguf import TYPES, GgufHeader, parse_header
from localllm.engine.files.gguf_values import MAX_HEADER, Array, HeaderCut

from ... import work
from .gguf_files import U32, U64, GgufFile, sound

STEPS = 400_000  # maximum number of calls and returns of one refusal
MEMORY = 64 * 2**20  # maximum bytes of Python objects of one refusal

NUMBERS = (0, 1, -1, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 8)
# Other numbers that are sound in their field: a boolean of another kind, a smaller tensor within its padding.
SOUND_NUMBERS = {"flag type": (0, 1), "second columns": (1,)}


def parsed(content: bytes, size: int | None = None) -> GgufHeader:
    return parse_header("m.gguf", content, len(content) if size is None else size)


def is_refused(content: bytes) -> bool:
    try:
        parsed(content)
    except ModelRefused:
        return True
    return False


def changed_numbers() -> Iterator[tuple[str, bytes]]:
    """Each integer of a sound header, replaced by each of NUMBERS."""
    file = sound()
    for name, (form, value) in file.fields.items():
        if form not in (U32, U64):
            continue
        for number in NUMBERS:
            fits = number < 1 << 8 * struct.calcsize(form)
            if fits and number != value and number not in SOUND_NUMBERS.get(name, ()):
                yield f"{name} = {number}", file.content(**{name.replace(" ", "_"): number})


def with_entry(*fields: tuple[str, int | float | bytes], key: str | bytes = "extra") -> bytes:
    """A sound file with one more metadata entry in front; `fields` follow its key."""
    file = sound()
    more = GgufFile()
    more.add_text("extra key", key)
    for index, (form, value) in enumerate(fields):
        more.add(f"extra {index}", form, value)
    names = list(file.fields)
    head = {name: file.fields[name] for name in names[:4]}
    tail = {name: file.fields[name] for name in names[4:]}
    file.fields = {**head, **more.fields, **tail}
    return file.content(entries=7)


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


SOUND = sound().content()
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty file": (lambda: b"", "needs 4"),
    "another format": (lambda: sound().content(magic=b"GGML"), "does not begin with GGUF"),
    "a pickle": (lambda: b"\x80\x04\x95" + bytes(100), "does not begin with GGUF"),
    "big-endian": (lambda: sound().content(version=3 << 24), "big-endian"),
    "version 1": (lambda: sound().content(version=1), "GGUF version 1; supported: 2 and 3"),
    "version 4": (lambda: sound().content(version=4), "GGUF version 4"),
    "more tensors than bytes": (lambda: sound().content(tensors=100), "more than its"),
    "more entries than bytes": (lambda: sound().content(entries=100), "more than its"),
    "one tensor more": (lambda: sound().content(tensors=3), "dimensions|bytes"),
    "one entry less": (lambda: sound().content(entries=5), "bytes; the limit is 63|dimensions"),
    "alignment of 0": (lambda: sound().content(alignment=0), "power of two"),
    "alignment of 24": (lambda: sound().content(alignment=24), "power of two"),
    "alignment of 2^31": (lambda: sound().content(alignment=2**31), "power of two"),
    "alignment is a number with a fraction": (lambda: sound().content(alignment_type=6), "power of two"),
    "smaller alignment than the padding": (lambda: sound().content(alignment=16), "expected 432|ends at byte|starts"),
    "misaligned": (lambda: sound().content(second_offset=449), "starts at byte 449 of the data, expected 448"),
    "overlap": (lambda: sound().content(second_offset=0), "starts at byte 0 of the data, expected 448"),
    "hole": (lambda: sound().content(second_offset=480), "starts at byte 480 of the data, expected 448"),
    "out of the file": (lambda: sound().content(second_offset=2**40), "expected 448"),
    "larger than the file": (lambda: sound().content(second_columns=16), "ends at byte"),
    "product above 2^63": (lambda: sound().content(columns=2**40, rows=2**40), "more than 2.63 - 1 values"),
    "product of 2^64": (lambda: sound().content(columns=2**32, rows=2**32), "more than 2.63 - 1 values"),
    "rows that are no blocks": (lambda: sound().content(columns=255), "not a multiple of 256"),
    "five dimensions": (lambda: sound().content(dimensions=5), "5 dimensions; the limit is 4"),
    "unknown tensor type": (lambda: sound().content(dtype=4), "unknown type 4"),
    "duplicate tensor": (
        lambda: sound().content(second_tensor_length=17, second_tensor=b"token_embd.weight"),
        "duplicate tensor name: 'token_embd.weight'",
    ),
    "tensor name is not UTF-8": (lambda: sound().content(tensor=b"\xff" * 17), "not UTF-8"),
    "long tensor name": (lambda: sound().content(tensor_length=64, tensor=b"x" * 64), "64 bytes; the limit is 63"),
    "duplicate key": (lambda: with_entry((U32, 4), (U32, 1), key="general.architecture"), "duplicate key"),
    "empty key": (lambda: with_entry((U32, 4), (U32, 1), key=""), "entry 0 is empty"),
    "key is not UTF-8": (lambda: with_entry((U32, 4), (U32, 1), key=b"\xff\xfe"), "not UTF-8"),
    "value is not UTF-8": (lambda: with_entry((U32, 8), ("s", text(b"\xc3\x28"))), "'extra' is not UTF-8"),
    "flag is neither true nor false": (lambda: with_entry((U32, 7), ("s", b"\x02")), "true .1. or false .0., not 2"),
    "unknown type": (lambda: with_entry((U32, 13), (U64, 0)), "unknown type 13"),
    "array in an array": (lambda: with_entry((U32, 9), (U32, 9), (U64, 1), (U32, 9)), "arrays of arrays"),
    "deep arrays": (lambda: with_entry((U32, 9), ("s", struct.pack("<IQ", 9, 1) * 9999)), "arrays of arrays"),
    "array of an unknown type": (lambda: with_entry((U32, 9), (U32, 99), (U64, 1)), "array of the unknown type 99"),
    "array longer than the file": (lambda: with_entry((U32, 9), (U32, 4), (U64, 10**6)), "more than its"),
    "strings longer than the file": (lambda: with_entry((U32, 9), (U32, 8), (U64, 10**6)), "more than its"),
    "string longer than the file": (lambda: with_entry((U32, 8), (U64, 10**9)), "needs 1000000"),
    "string beyond 64 bits": (lambda: with_entry((U32, 9), (U32, 8), (U64, 2), (U64, 2**64 - 8)), "needs 184467"),
    "data after the last tensor": (lambda: SOUND + bytes(33), "tensors end at byte"),
    "no data": (lambda: SOUND[:-480], "ends at byte"),
    "no tensors": (lambda: sound().content(tensors=0), "it has no tensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_header_is_refused_by_name(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ModelRefused, match=message) as refused:
        parsed(make())
    assert str(refused.value).startswith("m.gguf ")
    assert refused.value.hint


def test_every_number_is_checked() -> None:
    """Every integer of a header × numbers that overflow, point out of the file or mean nothing."""
    cases = dict(changed_numbers())
    assert len(cases) > 200
    tracemalloc.start()
    try:
        for name, content in cases.items():
            tracemalloc.reset_peak()
            refused: list[bool] = []
            assert work.steps(lambda: refused.append(is_refused(content))) < STEPS, name  # noqa: B023
            assert refused[0], name
            assert tracemalloc.get_traced_memory()[1] < MEMORY, name
    finally:
        tracemalloc.stop()


def test_sound_numbers_are_accepted() -> None:
    for name, numbers in SOUND_NUMBERS.items():
        for number in numbers:
            assert parsed(sound().content(**{name.replace(" ", "_"): number}))


def test_sound_file_is_read() -> None:
    header = parsed(SOUND)
    assert header.version == 3
    assert header.metadata == {
        "general.architecture": "llama",
        "general.alignment": 32,
        "tokenizer.ggml.add_bos_token": True,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": Array(2),
        "llama.attention.head_count_kv": Array(2, (8, 4)),
    }
    matrix, vector = header.tensors
    assert (matrix.name, matrix.dtype, matrix.shape) == ("token_embd.weight", "Q4_K", (256, 3))
    assert (matrix.num_values, matrix.num_bytes) == (768, 432)
    assert (vector.start, vector.stop) == (len(SOUND) - 32, len(SOUND) - 16)
    assert header.num_bytes == len(SOUND) - 480
    assert parsed(sound().content(version=2)).version == 2


@pytest.mark.parametrize("kind", [kind for kind in TYPES if TYPES[kind][0] != "I32"])
def test_tensor_of_each_type_has_its_size(kind: int) -> None:
    name, values, num_bytes = TYPES[kind]
    file = sound()
    file.data = bytes(-(-num_bytes // 32) * 32 + 32)
    content = file.content(dtype=kind, columns=values, rows=1, second_offset=len(file.data) - 32)
    tensor = parsed(content).tensors[0]
    assert (tensor.dtype, tensor.num_bytes) == (name, num_bytes)


def test_only_experts_of_tokens_are_integers() -> None:
    file = sound()
    file.data = bytes(256 * 3 * 4 + 32)
    changes = {"dtype": 26, "second_offset": 256 * 3 * 4}
    with pytest.raises(ModelRefused, match="type I32, which its weights cannot have"):
        parsed(file.content(**changes))
    name = b"blk.0.ffn_gate_tid2eid.weight"
    header = parsed(file.content(tensor=name, tensor_length=len(name), **changes))
    assert header.tensors[0].dtype == "I32"


def test_long_values_are_counted_but_not_returned() -> None:
    long_text = b"x" * (2**20 + 1)
    assert parsed(with_entry((U32, 8), ("s", text(long_text)))).metadata["extra"] == Array(len(long_text))
    flags = (U32, 9), (U32, 7), (U64, 2000), ("s", bytes(2000))
    assert parsed(with_entry(*flags)).metadata["extra"] == Array(2000)
    assert parsed(with_entry((U32, 9), (U32, 7), (U64, 2), ("s", b"\1\0"))).metadata["extra"] == Array(2, (True, False))


def test_beginning_of_a_header_asks_for_more() -> None:
    """Every prefix of a header asks for more bytes, never for more than the file has, and in the end for enough."""
    length = parsed(SOUND).num_bytes
    for stop in range(len(SOUND) - 490):
        with pytest.raises(HeaderCut) as cut:
            parsed(SOUND[:stop], len(SOUND))
        assert stop < cut.value.needed <= length
    assert parsed(SOUND[:length], len(SOUND)) == parsed(SOUND)


def test_cut_file_is_refused() -> None:
    for stop in range(0, len(SOUND) - 16, 3):
        with pytest.raises(ModelRefused):
            parsed(SOUND[:stop])


def test_flipped_bytes_are_refused_or_harmless() -> None:
    """If the header is accepted, its tensors lie inside the file."""
    for position in range(len(SOUND) - 480):
        content = bytearray(SOUND)
        content[position] ^= 0x15
        try:
            header = parsed(bytes(content))
        except ModelRefused:
            continue
        assert all(0 < tensor.start <= tensor.stop <= len(content) for tensor in header.tensors)


def test_number_of_strings_is_limited() -> None:
    strings = (U32, 9), (U32, 8), (U64, 2**21 + 1), ("s", bytes(8 * (2**21 + 1)))
    content = with_entry(*strings)

    def refuse() -> None:
        with pytest.raises(ModelRefused, match="2097153 strings up to 'extra'; the limit is 2097152"):
            parsed(content)

    assert work.steps(refuse) < STEPS, "no string is read"


def test_length_of_the_header_is_limited() -> None:
    """The limit holds before the rest of the header is requested."""
    entry = with_entry((U32, 9), (U32, 0), (U64, MAX_HEADER))
    with pytest.raises(ModelRefused, match=f"the limit is {MAX_HEADER}"):
        parsed(entry, 2**40)
