"""Models in GGUF files: their metadata, their shards, and the refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm import backends
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import ModelFiles, read_architecture, read_model

from .gguf_files import ALIGNMENT, TINY, model


def saved(folder: Path, name: str = "tiny.Q8_0.gguf", *, tensors: tuple[str, ...] = ("a",), **changes: Any) -> Path:
    """A GGUF file. `changes`: key of the metadata with "__" for "." -> value; None removes the key."""
    metadata = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    file = folder / name
    file.write_bytes(model({key: value for key, value in metadata.items() if value is not None}, tensors))
    return file


def sharded(folder: Path, count: int = 3, **changes: Any) -> Path:
    """The first shard of a model. It has metadata only; each other shard has a tensor."""
    for index in range(count):
        metadata = {"split.no": index, "split.count": count, "split.tensors.count": count - 1} | changes
        if index == 0:
            metadata = TINY | metadata
        file = folder / f"tiny-{index + 1:05}-of-{count:05}.gguf"
        file.write_bytes(model(metadata, [f"tensor.{index}"] if index else []))
    return folder / f"tiny-00001-of-{count:05}.gguf"


def read(folder: Path, **changes: Any) -> ModelFiles:
    return read_model(saved(folder, **changes))


def test_a_file_is_a_model(tmp_path: Path) -> None:
    file = saved(tmp_path, tensors=("a", "b"))
    files = read_model(file)
    assert files.gguf == (file,)
    assert files.path == file
    assert files.name == "tiny.Q8_0"
    assert list(files.tensors) == ["a", "b"]
    assert files.weight_bytes == 32
    assert files.tensors["b"].start - files.tensors["a"].start == ALIGNMENT
    config = files.config
    assert (config.model_type, config.max_positions, config.num_layers) == ("llama", 512, 2)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (64, 4, 2, 16)
    assert config.vocab_size == 4
    assert config.ropes["full"].theta == 500_000.0
    assert read_model(file, "org/tiny").name == "org/tiny"


def test_a_folder_with_one_gguf_model_is_a_model(tmp_path: Path) -> None:
    file = saved(tmp_path)
    saved(tmp_path, "mmproj-tiny.gguf", general__architecture="clip")
    (tmp_path / "config.json").write_text("{}")
    assert read_model(tmp_path).gguf == (file,)
    saved(tmp_path, "tiny.Q4_0.gguf")
    with pytest.raises(ModelRefused, match=r"has 2 GGUF models: tiny.Q4_0.gguf, tiny.Q8_0.gguf") as refused:
        read_model(tmp_path)
    assert refused.value.hint == "name one of the files"


def test_shards_are_one_model(tmp_path: Path) -> None:
    first = sharded(tmp_path)
    for path in (first, tmp_path, tmp_path / "tiny-00003-of-00003.gguf"):
        files = read_model(path)
        assert [file.name[:10] for file in files.gguf] == ["tiny-00001", "tiny-00002", "tiny-00003"]
        assert {name: tensor.file for name, tensor in files.tensors.items()} == {
            "tensor.1": files.gguf[1],
            "tensor.2": files.gguf[2],
        }
    assert read_model(first).name == "tiny"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    first = sharded(tmp_path)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelRefused, match=r"shard tiny-00002-of-00003.gguf is missing"):
        read_model(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.no": 0}, r"00002-of-00003.gguf: split.no must be 1"),
        ({"split.count": 2}, r"00001-of-00003.gguf: split.count must be 3"),
        ({"split.count": "3"}, r"split.count must be an integer"),
        ({"split.tensors.count": 5}, "its shards have 2 tensors, expected 5"),
    ],
)
def test_shards_that_contradict_their_names_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=message):
        read_model(sharded(tmp_path, **changes))


def test_a_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    other = sharded(tmp_path).rename(tmp_path / "other.gguf")
    with pytest.raises(ModelRefused, match=r"other.gguf: split.count must be 1"):
        read_model(other)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    first = sharded(tmp_path)
    second = tmp_path / "tiny-00002-of-00003.gguf"
    content = second.read_bytes().replace(b"tensor.1", b"tensor.2")
    second.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"'tensor.2' is in both tiny-00002"):
        read_model(first)


@pytest.mark.parametrize("name", ["tiny-00004-of-00003.gguf", "tiny-00000-of-00003.gguf", "tiny-00001-of-99999.gguf"])
def test_impossible_numbers_of_shards_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="a shard has a number from 1"):
        read_model(saved(tmp_path, name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": None}, "general.architecture must be a string, not nothing"),
        ({"general__architecture": 5}, "general.architecture must be a string, not 5"),
        ({"general__type": "adapter"}, "is not a model: its general.type is 'adapter'"),
        ({"general__type": "mmproj"}, "is not a model: its general.type is 'mmproj'"),
        ({"general__architecture": "clip"}, "is an image encoder"),
        ({"llama__context_length": None}, "llama.context_length must be an integer"),
        ({"llama__context_length": 0}, "llama.context_length must be an integer"),
        ({"llama__context_length": [512, 512]}, "llama.context_length must be an integer"),
        ({"llama__block_count": 2**31}, "llama.block_count must be an integer"),
        ({"llama__embedding_length": "wide"}, "llama.embedding_length must be an integer"),
        ({"llama__attention__head_count": [4.0, 4.0]}, "llama.attention.head_count must be integers"),
        ({"llama__attention__head_count": -1}, "llama.attention.head_count must be an integer"),
        ({"llama__rope__dimension_count": 0}, "llama.rope.dimension_count must be an even number in 2…"),
        ({"llama__rope__dimension_count": 3}, "llama.rope.dimension_count must be an even number in 2…"),
        ({"llama__rope__dimension_count": 2**15}, "llama.rope.dimension_count must be an even number in 2…"),
        ({"llama__rope__dimension_count_swa": 0}, "llama.rope.dimension_count_swa must be an even number in 2…"),
        ({"llama__attention__sliding_window": 2**31 - 1}, "llama.attention.sliding_window must be a number up to"),
    ],
)
def test_wrong_metadata_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=message):
        read(tmp_path, **changes)


def test_an_architecture_may_be_unknown(tmp_path: Path) -> None:
    keys = {key.replace(".", "__"): value for key, value in TINY.items() if key.startswith("llama.")}
    changes = dict.fromkeys(keys) | {key.replace("llama", "new", 1): value for key, value in keys.items()}
    files = read(tmp_path, general__architecture="new", **changes)
    assert (files.config.model_type, files.config.max_positions) == ("new", 512)


def test_layers_may_have_different_numbers_of_heads(tmp_path: Path) -> None:
    config = read(tmp_path, llama__attention__head_count=[4, 8], llama__attention__head_count_kv=[0, 2]).config
    assert (config.num_heads, config.num_kv_heads) == (8, 2)


def test_end_ids_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    changes = {"tokenizer__ggml__eot_token_id": 3, "tokenizer__ggml__eom_token_id": 4}
    assert read(tmp_path, **changes).eos_ids == (2, 3)


def test_recommended_sampling_has_the_names_of_localllm(tmp_path: Path) -> None:
    changes = {"general__sampling__temp": 0.2, "general__sampling__top_k": 20, "general__sampling__penalty_repeat": 1.5}
    assert read(tmp_path, **changes).generation == {"temperature": 0.2, "top_k": 20.0, "repetition_penalty": 1.5}


def test_recommended_sampling_out_of_range_is_ignored_with_a_warning(tmp_path: Path) -> None:
    files = read(tmp_path, general__sampling__temp=-1.0, general__sampling__top_k=-1, general__sampling__top_p=0.5)
    assert files.generation == {"top_p": 0.5}
    assert [warning.partition("general.")[2] for warning in files.warnings] == [
        "sampling.temp -1.0 is ignored: it must be a number in 0…100",
        "sampling.top_k -1 is read as no limit",
    ]


def test_suppressed_tokens_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    assert read(tmp_path, tokenizer__ggml__suppress_tokens=[3, 4, -1, 1]).suppressed == (3, 1)


def test_scaled_ropes_are_described(tmp_path: Path) -> None:
    changes = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 128,
    }
    rope = read(tmp_path, **changes).config.ropes["full"]
    assert (rope.kind, rope.factor, rope.original_positions) == ("yarn", 4.0, 128)


def test_a_file_without_a_number_of_shards_needs_tensors(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="it has no tensors"):
        read(tmp_path, tensors=())


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    tokens = [f"token {index:08}" for index in range(50_000)]
    assert read(tmp_path, tokenizer__ggml__tokens=tokens).config.vocab_size == 50_000


def test_read_architecture_reads_no_tensors(tmp_path: Path) -> None:
    files = read_architecture(saved(tmp_path))
    assert files.config.model_type == "llama"
    assert not files.tensors
    assert files.gguf


@pytest.mark.parametrize("backend", ["cpu", "cuda", "hip", "xpu", "npu", "mlx"])
def test_other_backends_refuse_gguf_files(backend: str, tmp_path: Path) -> None:
    accepts = getattr(backends.load(backend), "accepts", None)
    if accepts is None:
        pytest.skip("this backend has no runner")
    assert accepts(read_model(saved(tmp_path))) == "it reads no GGUF files"


def test_safetensors_files_are_preferred(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        read_model(tmp_path)
