"""`localllm inspect`: models, adapters and GGUF files, on the disk and as skeletons of remote repositories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from localllm.app.commands.inspect import inspect as print_inspection
from localllm.app.errors import ModelNotFound, ModelUnusable
from localllm.app.store.checks import skeleton as skeletons
from localllm.app.store.checks.skeleton import RemoteHead, skeleton
from localllm.app.store.checks.template import try_templates
from localllm.app.store.inspection.models import inspect, inspect_path, licence
from localllm.app.store.inspection.opening import Origin
from localllm.app.store.inspection.tensors import num_parameters
from localllm.app.store.local.refs import read_ref
from localllm.app.store.names import HubName
from localllm.app.store.records import DtypeShare, Inspection
from localllm.app.store.remote import RemoteFile
from localllm.app.store.selection import select
from localllm.engine.errors import ModelRefused
from localllm.engine.files.tensor_files import StoredTensor

from ....engine.files.gguf_files import TINY, sound
from ....engine.files.gguf_files import model as gguf_model
from ...tiny_qwen import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder)
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: my-licence\n---\n# Tiny\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    return folder


def inspected(path: Path) -> Inspection:
    return inspect_path(path, Origin(path.name, str(path)))


def test_model_is_described(model: Path) -> None:
    result = inspected(model)
    assert (result.kind, result.architecture, result.licence) == ("model", "qwen3", "my-licence")
    assert result.usable
    assert result.problems == ()
    assert result.bytes == sum(share.bytes for share in result.dtypes)
    assert result.parameters is not None
    assert result.template is not None
    assert (result.template.status, result.template.system, result.template.tools) == ("works", True, True)
    assert result.pickles == ("pytorch_model.bin",)
    assert result.code == ("modeling_tiny.py",)
    verdicts = {verdict.backend: verdict for verdict in result.backends}
    assert verdicts[result.choice].runs
    assert not verdicts["llamacpp"].runs
    values = msgspec.to_builtins(result)
    assert values.pop("usable") is True
    assert msgspec.convert(json.loads(json.dumps(values)), Inspection) == result


def test_damaged_model_is_described_as_far_as_possible(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(5000)
    result = inspected(folder)
    assert result.architecture == "qwen3"
    assert not result.usable
    assert len(result.problems) == 1
    assert result.parameters is None
    assert not any(verdict.runs for verdict in result.backends)


def test_odd_values_of_a_model_are_warnings(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    (folder / "generation_config.json").write_text("")
    hub = Hub(folder)
    with skeleton(hub.files, hub.fetch) as place:
        remote = inspected(place)
    result = inspected(folder)
    [warning] = result.warnings
    assert result.usable
    assert remote.warnings == result.warnings
    assert warning.startswith("generation_config.json is not JSON")
    assert print_inspection(str(folder), False) == 0
    assert f"warning        {warning}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_weight_format_of_a_side_file_is_read_before_a_download(name: str, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    (folder / name).write_text('{"bits": 3, "quantization": {"quant_algo": "NVFP4"}}')
    hub = Hub(folder)
    with skeleton(hub.files, hub.fetch) as place:
        [problem] = inspected(place).problems
    assert "NVIDIA ModelOpt as NVFP4" in problem or "bits must be 4" in problem


def test_the_format_of_mistrals_own_programs_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    shutil.copy(model / "model.safetensors", tmp_path / "consolidated.safetensors")
    with pytest.raises(ModelRefused, match="Mistral's own format"):
        inspected(tmp_path)
    files = [RemoteFile(file.name, 9) for file in tmp_path.iterdir()]
    with pytest.raises(ModelUnusable, match="Mistral's own format"):
        select(HubName("org/m"), files)


def test_malformed_config_is_the_problem(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    (folder / "config.json").write_text("{}")
    result = inspected(folder)
    assert "model_type" in result.problems[0]
    assert (result.architecture, result.context) == ("", 0)
    assert result.bytes > 0


def test_model_without_tokenizer_is_not_usable(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    (folder / "tokenizer.json").unlink()
    assert inspected(folder).problems == ("tokenizer.json is missing",)


def test_unsupported_architecture_has_the_reason_of_each_backend(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mamba2", "auto_map": {"AutoModel": "x.Y"}}
    (folder / "config.json").write_text(json.dumps(config))
    result = inspected(folder)
    assert (result.choice, result.usable) == ("", False)
    says = {verdict.backend: verdict.says for verdict in result.backends}
    assert "transformers' code of mamba2 is not supported" in says["cpu"]
    assert result.hint.endswith("to find them: localllm search tiny gguf")
    assert result.code == ("modeling_tiny.py", "auto_map in config.json")


def test_other_code_is_named(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "apertus"}))
    says = {verdict.backend: verdict.says for verdict in inspected(folder).backends}
    assert says["cpu"].endswith(", transformers' code")
    assert not {verdict.says for verdict in inspected(model).backends if "transformers' code" in verdict.says}


def test_adapter_is_described(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": np.zeros((2, 8)), f"{name}.lora_B.weight": np.zeros((6, 2))}
    save_file({key: value.astype(np.float32) for key, value in factors.items()}, tmp_path / "adapter_model.safetensors")
    result = inspected(tmp_path)
    assert (result.kind, result.base, result.rank, result.parameters) == ("adapter", "org/base", 2, 28)
    assert result.dtypes == (DtypeShare("F32", 2, 112),)
    assert result.usable
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    damaged = inspected(tmp_path)
    assert "DoRA" in damaged.problems[0]
    assert not damaged.usable


def test_gguf_file_is_described(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(sound().content())
    result = inspected(file)
    assert (result.kind, result.architecture, result.quantization) == ("gguf", "llama", "Q4_K")
    assert (result.parameters, result.bytes) == (772, 448)
    assert not result.usable
    assert inspected(tmp_path).dtypes == result.dtypes
    file.write_bytes(sound().content(alignment=3))
    damaged = inspected(file)
    assert "general.alignment" in damaged.problems[0]
    assert damaged.parameters is None


def test_folder_with_several_gguf_models_is_not_described_as_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(sound().content())
    with pytest.raises(ModelRefused, match="has 2 GGUF models") as caught:
        inspected(tmp_path)
    assert caught.value.hint == "name one of the files: a.gguf, b.gguf"
    (tmp_path / "b.gguf").rename(tmp_path / "b-Q8_0.gguf")
    (tmp_path / "a.gguf").rename(tmp_path / "a-Q4_K_M.gguf")
    assert inspected(tmp_path).parameters == inspected(tmp_path / "a-Q4_K_M.gguf").parameters


def test_names_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"has no config.json"):
        inspect(str(tmp_path))
    with pytest.raises(ModelNotFound, match="does not exist"):
        inspect(str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFound, match="does not exist"):
        inspect("/" + "x" * 4000)
    assert inspect("guide").source.endswith("guide")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: apache-2.0\n---", "apache-2.0"),
        ('---\r\nlicense: "mit"\r\n---', "mit"),
        ("---\nlicense: other\n---", "other"),
        ("---\nlicense: other\nlicense_name: gemma\n---", "gemma"),
        ("---\nlanguage: en\n---\nlicense: mit", ""),
        ("license: mit", ""),
    ],
)
def test_licence_is_read_from_the_front_matter(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(text.encode())
    assert licence(read_ref(tmp_path)) == expected


TEMPLATES = {
    "{{ messages[0].content }}": ("works", True, False),
    "{{ messages[-1].content }}{{ tools }}": ("works", False, True),
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    "{% endfor %}": ("works", False, False),
    "{{ messages[0]": ("fails", False, False),
    "hello": ("fails", False, False),
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": ("fails", False, False),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_is_tried(template: str) -> None:
    verdict = try_templates({"default": template}, {})
    assert (verdict.status, verdict.system, verdict.tools) == TEMPLATES[template]
    assert bool(verdict.reason) == (verdict.status == "fails")


def stored(dtype: str, *shape: int) -> StoredTensor:
    return StoredTensor(Path("x"), dtype, shape, 0, 0)


PARAMETERS: dict[str, tuple[dict[str, StoredTensor], dict[str, Any]]] = {
    "float": ({"a.weight": stored("BF16", 8, 64), "a.bias": stored("BF16", 8)}, {}),
    "gptq": (
        {
            "a.qweight": stored("I32", 8, 8),
            "a.qzeros": stored("I32", 1, 1),
            "a.scales": stored("F16", 1, 8),
            "a.g_idx": stored("I32", 64),
            "a.bias": stored("F16", 8),
        },
        {"quantization_config": {"bits": 4}},
    ),
    "compressed": (
        {"a.weight_packed": stored("I32", 8, 8), "a.weight_shape": stored("I64", 2), "a.bias": stored("F16", 8)},
        {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}},
    ),
    "mlx": (
        {
            "a.weight": stored("U32", 8, 16),
            "a.scales": stored("BF16", 8, 1),
            "a.biases": stored("BF16", 8, 1),
            "a.bias": stored("BF16", 8),
        },
        {"quantization": {"bits": 4, "a": {"bits": 8}}},
    ),
    "fp8": (
        {"a.weight": stored("F8_E4M3", 8, 64), "a.weight_scale": stored("F32", 1), "a.bias": stored("BF16", 8)},
        {"quantization_config": {"quant_method": "fp8"}},
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted_before_quantisation(name: str) -> None:
    assert num_parameters(*PARAMETERS[name]) == 8 * 64 + 8


class Hub:
    """Serves ranges of the files of a folder, and counts the bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served: dict[str, int] = {}

    @property
    def files(self) -> list[RemoteFile]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [RemoteFile(str(path.relative_to(self.folder)), path.stat().st_size) for path in paths]

    def fetch(self, file: RemoteFile, offset: int, length: int) -> bytes:
        self.served[file.name] = self.served.get(file.name, 0) + length
        return (self.folder / file.name).read_bytes()[offset : offset + length]


def test_skeleton_is_inspected_like_the_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeletons, "FIRST_BYTES", 100)
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages[0].content }}{{ tools }}")
    hub = Hub(folder)
    origin = Origin("tiny", "here", local=False, files=tuple(file.name for file in hub.files))
    with skeleton(hub.files, hub.fetch) as place:
        assert inspect_path(place, origin) == inspect_path(folder, origin)
        assert (place / "tokenizer.json").stat().st_size == (folder / "tokenizer.json").stat().st_size
    assert not place.exists()
    assert hub.served["model.safetensors"] < (folder / "model.safetensors").stat().st_size / 2
    assert "tokenizer.json" not in hub.served
    assert "pytorch_model.bin" not in hub.served


GGUF_TEMPLATES = {
    "tokenizer.chat_template": "{{ bos_token + messages[0].content }}",
    "tokenizer.chat_template.tool_use": "{{ messages[0].content }}{{ tools[0].function.name }}",
}


def test_chat_templates_of_a_gguf_file_are_tried(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_model(TINY | GGUF_TEMPLATES | {"tokenizer.ggml.bos_token_id": 0}))
    template = inspected(file).template
    assert template is not None
    assert (template.status, template.system, template.tools) == ("works", True, True)
    file.write_bytes(gguf_model(TINY | GGUF_TEMPLATES))
    template = inspected(file).template
    assert template is not None
    assert template.status == "fails", "bos_token is undefined without its metadata"
    assert "bos_token" in template.reason
    file.write_bytes(gguf_model(TINY | GGUF_TEMPLATES | {"tokenizer.ggml.model": "t5"}))
    template = inspected(file).template
    assert template is not None
    assert template.status == "works", "sentencepiece vocabularies have a default"


def test_rope_scaling_is_described(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    file.write_bytes(gguf_model(TINY | scaling))
    assert inspected(file).rope_scaling == "yarn, factor 4, trained with 128 tokens"
    file.write_bytes(gguf_model(TINY))
    assert inspected(file).rope_scaling == ""


def test_skeleton_of_a_gguf_file_has_its_header(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(sound().content())
    hub = Hub(folder)
    with skeleton(hub.files, hub.fetch) as place:
        assert inspected(place / "m.gguf").dtypes == inspected(folder / "m.gguf").dtypes


def test_remote_head_fetches_each_byte_once() -> None:
    requests = []

    def fetch(_: RemoteFile, offset: int, length: int) -> bytes:
        requests.append((offset, length))
        return bytes(length)

    head = RemoteHead(RemoteFile("a/m.safetensors", 10**9), fetch)
    assert (head.name, len(head.read(0, 8)), len(head.read(8, 1000))) == ("m.safetensors", 8, 1000)
    assert len(head.read(8, 2**20)) == 2**20
    assert requests == [(0, 2**18), (2**18, 2**20 + 8 - 2**18)]


def test_hostile_repositories_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(_: RemoteFile, offset: int, length: int) -> bytes:
        return bytes(length)

    with pytest.raises(ModelUnusable, match="the limit is"), skeleton([RemoteFile("config.json", 2**30)], fetch):
        pass
    with (
        pytest.raises(ModelRefused, match=r"not JSON|needs"),
        skeleton([RemoteFile("a.safetensors", 2**60)], lambda *_: b"\xff" * 8),
    ):
        pass
    monkeypatch.setattr(skeletons, "MAX_FETCHED", 2**20)
    files = [RemoteFile(f"additional_chat_templates/{index}.jinja", 2**18) for index in range(9)]
    with pytest.raises(ModelUnusable, match="have more than 1048576 bytes"), skeleton(files, fetch):
        pass
