"""Malformed safetensors and JSON headers: each field × hostile values. Each file is refused fast, in little memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.files.tensor_files import MAX_HEADER, read_header
from localllm.engine.files.weight_files import INDEX, SINGLE

from ... import work

STEPS = 400_000  # maximum number of calls and returns of one refusal
MEMORY = 64 * 2**20  # maximum bytes of Python objects of one refusal, besides the bytes of the header

HEADER: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
NUMBERS = (0, -1, 2**31 - 1, 2**53, 2**63 - 1, 2**63, 2**64, 10**40)
NO_NUMBERS = (1.5, True, "1", [], [1], {}, {"a": 1}, float("nan"), float("inf"))
NO_TEXTS = (0, -1, True, None, [], ["llama"], {}, 1e308)


def changed(values: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of a JSON value with another value at `path`."""
    copy = deepcopy(values)
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


def safetensors(header: Any, data: bytes = bytes(32)) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def changed_headers() -> Iterator[tuple[str, bytes]]:
    """Each field of a safetensors header, replaced by each hostile value."""
    places: list[tuple[str | int, ...]] = [("a", "shape", 0), ("a", "shape", 1), ("b", "shape", 0)]
    places += [(name, "data_offsets", index) for name in "ab" for index in (0, 1)]
    for path in places:
        for value in (*NUMBERS, *NO_NUMBERS, None):
            is_sound = path == ("a", "data_offsets", 0) and value == 0 and type(value) is int
            if not is_sound:
                yield f"{path} = {value!r}", safetensors(changed(HEADER, path, value))
    for name in "ab":
        for value in NO_TEXTS:
            yield f"{name}.dtype = {value!r}", safetensors(changed(HEADER, (name, "dtype"), value))
        for field in ("shape", "data_offsets"):
            for value in (*NUMBERS, "1", None, {}, [[1]], [1] * 99):
                yield f"{name}.{field} = {value!r:.30}", safetensors(changed(HEADER, (name, field), value))
    for number in (0, 1, 7, 2**31, 2**63, 2**64 - 1, 2**64 - 8):
        yield f"header length = {number}", struct.pack("<Q", number) + safetensors(HEADER)[8:]


def changed_configs() -> Iterator[tuple[str, bytes]]:
    """Each field of config.json, replaced by each hostile value."""
    for field, sound in CONFIG.items():
        values = NO_TEXTS if isinstance(sound, str) else (*NUMBERS, *NO_NUMBERS)
        for value in values:
            if field == "max_position_embeddings" and type(value) is int and 0 < value <= 2**63:
                continue  # more than localllm computes, with a warning
            yield f"{field} = {value!r}", json.dumps({**CONFIG, field: value}).encode()


def large(unit: bytes, opening: bytes, closing: bytes) -> Callable[[], bytes]:
    """The largest safetensors file that has nothing but a header of repeated units."""

    def make() -> bytes:
        units = (MAX_HEADER - len(opening) - len(closing)) // len(unit)
        raw = opening + unit * units + closing
        return struct.pack("<Q", len(raw)) + raw

    return make


LARGE = {
    "deep lists": large(b"[", b"", b""),
    "deep objects": large(b'{"a":', b"", b""),
    "many numbers": large(b"1,", b'{"a":[', b"1]}"),
    "one name many times": large(b'"a":{},', b"{", b'"a":{}}'),
    "many objects": large(b"{},", b'{"a":[', b"{}]}"),
    "many lists": large(b"[],", b'{"a":[', b"[]]}"),
    "spaces": large(b" ", b"", b""),
    "a long text": large(b"x", b'{"a":"', b'"}'),
    "a long text of escapes": large(b"\\u00e9", b'{"a":"', b'"}'),
    "a long number": large(b"9", b'{"a":', b"}"),
    "a long fraction": large(b"9", b'{"a":0.', b"}"),
}


def refusal(read: Callable[[], object], size: int) -> str:
    """The message of the ModelRefused that `read` raises. Checks the work and the memory of the refusal."""
    messages: list[str] = []

    def refuse() -> None:
        try:
            read()
        except ModelRefused as error:
            messages.append(str(error))

    tracemalloc.start()
    try:
        count = work.steps(refuse)
    finally:
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert count < STEPS
    assert memory < MEMORY + 3 * size
    return "".join(messages)


def test_every_field_of_a_safetensors_header_is_checked(tmp_path: Path) -> None:
    cases = dict(changed_headers())
    assert len(cases) > 150
    file = tmp_path / SINGLE
    for name, content in cases.items():
        file.write_bytes(content)
        assert refusal(lambda: read_header(file), len(content)).startswith(SINGLE), name


def test_every_field_of_config_json_is_checked(tmp_path: Path) -> None:
    cases = dict(changed_configs())
    assert len(cases) > 100
    (tmp_path / SINGLE).write_bytes(safetensors(HEADER))
    for name, content in cases.items():
        (tmp_path / "config.json").write_bytes(content)
        assert refusal(lambda: read_model(tmp_path), len(content)).startswith("config.json: "), name


@pytest.mark.parametrize("name", LARGE)
def test_largest_header_is_refused_fast(name: str, tmp_path: Path) -> None:
    file = tmp_path / SINGLE
    content = LARGE[name]()
    file.write_bytes(content)
    message = refusal(lambda: read_header(file), len(content))
    assert message.startswith(f"{SINGLE} is not a valid safetensors file")
    assert len(message) < 500


INDEXES: dict[str, tuple[Any, str]] = {
    "no map": ({}, "weight_map must be an object"),
    "map is a list": ({"weight_map": ["a"]}, "weight_map must be an object"),
    "map is empty": ({"weight_map": {}}, "weight_map must be an object"),
    "file is a number": ({"weight_map": {"a": 1}}, "names 1"),
    "file is a list": ({"weight_map": {"a": ["x.safetensors"]}}, "names ['x.safetensors']"),
    "file is null": ({"weight_map": {"a": None}}, "names None"),
    "file in the parent folder": ({"weight_map": {"a": "../x.safetensors"}}, "names '../x.safetensors'"),
    "absolute file": ({"weight_map": {"a": "/x.safetensors"}}, "names '/x.safetensors'"),
    "file with a zero byte": ({"weight_map": {"a": "x\0.safetensors"}}, "names 'x"),
    "file of another kind": ({"weight_map": {"a": "x.bin"}}, "names 'x.bin'"),
    "the index itself": ({"weight_map": {"a": INDEX}}, f"names '{INDEX}'"),
    "missing file": ({"weight_map": {"a": "x.safetensors"}}, "shard x.safetensors is missing"),
    "long file name": ({"weight_map": {"a": "x" * 5000 + ".safetensors"}}, "names 'xxx"),
    "file name of many bytes": ({"weight_map": {"a": "\u4e00" * 200 + ".safetensors"}}, "cannot be read"),
    "link to itself": ({"weight_map": {"a": "loop.safetensors"}}, "shard loop.safetensors is missing"),
    "absent tensor": ({"weight_map": {"a": "y.safetensors", "lm_head.weight": "y.safetensors"}}, "head.weight' is not"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_malformed_index_is_refused_by_name(name: str, tmp_path: Path) -> None:
    index, expected = INDEXES[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "y.safetensors").write_bytes(safetensors(HEADER))
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    content = json.dumps(index)
    (tmp_path / INDEX).write_text(content)
    message = refusal(lambda: read_model(tmp_path), len(content))
    assert expected in message
    assert len(message) < 1000
