"""Headers of local files, and the check of models on disk."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from localllm.app.bounded import BoundedChild, Exhausted
from localllm.app.store.checks import architectures, headers, headers_child
from localllm.app.store.checks.files import check
from localllm.app.store.checks.headers import LocalFile, read_gguf, safetensors_head
from localllm.app.store.checks.headers_child import Answer, Job, answer
from localllm.app.store.local import ggufs
from localllm.app.store.local.refs import read_ref
from localllm.engine.errors import ModelRefused
from localllm.engine.files.tensor_files import parse_header, read_header

from ....engine.files.gguf_files import TINY, sound
from ....engine.files.gguf_files import model as gguf_model
from ...tiny_qwen import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder)
    return folder


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "tiny"))


def large_gguf(file: Path) -> bytes:
    """A GGUF file whose header is longer than the first read."""
    sample = sound()
    sample.fields["value length"] = "<Q", 2**20
    sample.fields["value"] = "s", b"x" * 2**20
    content = sample.content()
    file.write_bytes(content)
    return content


def test_gguf_header_is_parsed_in_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    content = large_gguf(file)
    requests: list[int] = []
    call = BoundedChild.call

    def record(child: BoundedChild, request: bytes) -> bytes:
        requests.append(len(request))
        return call(child, request)

    monkeypatch.setattr(BoundedChild, "call", record)
    header = read_gguf(LocalFile.open(file))
    assert header == answer(Job("m.gguf", content, len(content))).header
    assert [tensor.name for tensor in header.tensors] == ["token_embd.weight", "output_norm.weight"]
    assert len(requests) == 2


def test_malformed_gguf_is_refused_across_processes(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(sound().content(alignment=24))
    with pytest.raises(ModelRefused, match=r"m.gguf is not a valid GGUF file: general.alignment") as refused:
        read_gguf(LocalFile.open(file))
    assert "download it again" in refused.value.hint


def test_child_that_crashes_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = BoundedChild("localllm.no_such_module", cpu=9, wall=9, memory=2**30, hello=lambda: b"")
    monkeypatch.setattr(headers, "_child", lambda: child)
    file = tmp_path / "m.gguf"
    file.write_bytes(sound().content())
    with pytest.raises(ModelRefused, match="cannot parse its header: it crashed or exceeded its memory limit"):
        read_gguf(LocalFile.open(file))
    child.close()


def test_child_reports_that_memory_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*_: object) -> Answer:
        raise MemoryError

    monkeypatch.setattr("localllm.app.store.checks.headers_child.answer", exhaust)
    with pytest.raises(Exhausted) as exhausted:
        headers_child._handle(msgspec.msgpack.encode(Job("m.gguf", b"", 0)))
    assert b"memory limit" in exhausted.value.reply


def test_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    content = sound().content()
    file.write_bytes(content[:99])
    with pytest.raises(ModelRefused, match=f"m.gguf has 99 bytes, not {len(content)}"):
        read_gguf(LocalFile(file, len(content)))


def test_safetensors_head_is_the_header_with_its_length(model: Path) -> None:
    file = model / "model.safetensors"
    reader = LocalFile.open(file)
    head = safetensors_head(reader)
    assert parse_header(file, head[8:], reader.size) == read_header(file)
    with pytest.raises(ModelRefused, match="its header needs"):
        safetensors_head(LocalFile(file, len(head) - 1))


def write_adapter(folder: Path, **config: object) -> None:
    folder.mkdir()
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": np.zeros((2, 8)), f"{name}.lora_B.weight": np.zeros((8, 2))}
    save_file({key: value.astype(np.float32) for key, value in factors.items()}, folder / "adapter_model.safetensors")


def test_sound_models_and_adapters_have_no_problem(model: Path, tmp_path: Path) -> None:
    assert check(read_ref(model)) == []
    write_adapter(tmp_path / "adapter")
    assert check(read_ref(tmp_path / "adapter")) == []
    (tmp_path / "m.gguf").write_bytes(gguf_model(TINY))
    assert check(read_ref(tmp_path / "m.gguf"), ask_backends=False) == check(read_ref(tmp_path)) == []
    (tmp_path / "m.gguf").write_bytes(sound().content())
    assert check(read_ref(tmp_path / "m.gguf"), ask_backends=False) == [
        "m.gguf: llama.embedding_length must be an integer in 1…1048576, not nothing"
    ]


def cut(file: Path, length: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(length)


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


WEIGHTS = "model.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (lambda folder: cut(folder / WEIGHTS, 50_000), "end at byte"),
    "truncated header": (lambda folder: cut(folder / WEIGHTS, 100), "its header needs"),
    "empty weights": (lambda folder: cut(folder / WEIGHTS, 0), "0 bytes"),
    "random bytes": (lambda folder: (folder / WEIGHTS).write_bytes(bytes(range(256)) * 9), "its header needs"),
    "a web page": (lambda folder: (folder / WEIGHTS).write_text("<!DOCTYPE html>" * 9), "its header needs"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no weights"),
    "missing shard": (damage_index, "shard model-1.safetensors is missing"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "malformed config": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "a tokenizer that transformers builds from its class": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}'),
        "tokenizer_class T5Tokenizer: transformers builds this tokenizer from its class",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_model_has_a_problem(name: str, copy: Path) -> None:
    damage, message = DAMAGE[name]
    damage(copy)
    [problem] = check(read_ref(copy))
    assert message in problem


def test_damaged_adapters_and_gguf_files_have_problems(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", use_dora=True)
    assert "DoRA" in check(read_ref(tmp_path / "adapter"))[0]
    cut(tmp_path / "adapter" / "adapter_model.safetensors", 9)
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "its header needs" in check(read_ref(tmp_path / "adapter"))[0]
    shard = tmp_path / "m-00002-of-00003.gguf"
    shard.write_bytes(sound().content()[:-100])
    missing, damaged = check(read_ref(tmp_path))
    assert missing == "shard m-00001-of-00003.gguf is missing"
    assert "ends at byte" in damaged
    assert check(read_ref(tmp_path / "other.gguf")) == ["other.gguf cannot be read: No such file or directory"]


def test_shards_are_counted_for_each_model(tmp_path: Path) -> None:
    """Models with the same name and other numbers of shards are two models."""
    for name in ("a-00002-of-00003", "a-00003-of-00003", "a-00001-of-00002", "a-00002-of-00002", "b-00001-of-99999"):
        (tmp_path / f"{name}.gguf").write_bytes(sound().content())
    assert check(read_ref(tmp_path))[:2] == [
        "shard a-00001-of-00003.gguf is missing",
        "shard b-00002-of-99999.gguf is missing",
    ]
    models = {model.path.name: model.is_complete for model in ggufs.models_in(tmp_path)}
    assert models == {"a-00001-of-00002.gguf": True, "a-00002-of-00003.gguf": False, "b-00001-of-99999.gguf": False}


def set_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_unknown_architecture_is_left_to_the_backends(copy: Path) -> None:
    set_config(copy, model_type="mamba2")
    [problem] = check(read_ref(copy))
    assert problem.startswith(
        "no backend supports this model (cuda, hip, npu, xpu, cpu: transformers' code of mamba2 is"
    )
    assert check(read_ref(copy), ask_backends=False) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("""print('[["", ""]]')""", None),
        ("""print('[["no backend", ""]]')""", "no backend"),
        ("raise SystemExit(3)", "cannot be asked about the architecture: the process ended with 3"),
        ("import time; time.sleep(60)", "gave no answer about the architecture within 0.5 s"),
    ],
)
def test_answer_of_the_backends_is_the_problem(
    script: str, message: str | None, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_config(copy, model_type="mystery")
    monkeypatch.setattr(architectures, "ACCEPTS", (sys.executable, "-c", script))
    monkeypatch.setattr(architectures, "START_SECONDS", 0.5 if "sleep" in script else 60.0)
    monkeypatch.setattr(architectures, "SECONDS_PER_MODEL", 0.0)
    problems = check(read_ref(copy))
    assert problems == [] if message is None else message in problems[0]
