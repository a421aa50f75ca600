"""GGUF models, single weight files and repositories without usable weights, on every command of the store."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from localllm import backends
from localllm.app import config, paths
from localllm.app.api.admin import LoadFlags
from localllm.app.cli import main
from localllm.app.daemon.loading import load_settings
from localllm.app.daemon.names import Names
from localllm.app.errors import ModelNotFound, WrongKind
from localllm.app.store import listing, resolved
from localllm.app.store.adapters import folders
from localllm.app.store.checks import architectures, headers
from localllm.app.store.local import finding, ggufs, snapshots
from localllm.engine.files.gguf import GgufHeader
from localllm.engine.runner import Unavailable

from ....engine.files.gguf_corruptions import F32, Tensor, Value, content, text
from ....engine.files.gguf_files import TINY, model
from ...hub import CONFIG, Hub, adapter_files, model_files, safetensors, serving

GGUF = model(TINY)
BERT = {key.replace("llama.", "bert."): value for key, value in TINY.items()} | {"general.architecture": "bert"}
NOT_INSTALLED = "llama-cpp-python is not installed: pip install 'localllm[llamacpp]'"
ADAPTER = content(
    {
        "general.architecture": text("llama"),
        "general.type": text("adapter"),
        "general.base_model.0.repo_url": text("https://huggingface.co/org/base"),
        "adapter.type": text("lora"),
        "adapter.lora.alpha": Value(F32, 4.0),
    },
    {"blk.0.attn_q.weight.lora_a": Tensor((32, 2)), "blk.0.attn_q.weight.lora_b": Tensor((2, 32))},
)
Run = Callable[..., tuple[int, str, str]]


def shards() -> dict[str, bytes]:
    """The files of a model with two shards: name -> content."""
    files = {}
    for index in (0, 1):
        split = {"split.no": index, "split.count": 2, "split.tensors.count": 2}
        metadata = {**TINY, **split} if index == 0 else split
        files[f"Q4_K_M/m-Q4_K_M-0000{index + 1}-of-00002.gguf"] = model(metadata, [f"tensor.{index}"])
    return files


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is supported by a backend that is installed."""
    answer_with(monkeypatch, "", "")


def answer_with(monkeypatch: pytest.MonkeyPatch, refusal: str, missing: str, install: str = "") -> None:
    """Replace the process that asks the backends."""
    script = f"import json, sys; print(json.dumps([{[refusal, missing, install]!r}] * (len(sys.argv) - 1)))"
    monkeypatch.setattr(architectures, "ACCEPTS", (sys.executable, "-c", script))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repos = {
        "org/gguf": {**shards(), "m-Q8_0.gguf": GGUF, "mmproj-F16.gguf": b"x", "README.md": b"card"},
        "org/single": {"model.gguf": GGUF},
        "org/lora": {"lora-f16.gguf": ADAPTER},
        "org/both": {**model_files(), "m-Q8_0.gguf": GGUF},
        "org/bert": {"m-Q8_0.gguf": model(BERT)},
        "org/pickle": {"config.json": CONFIG, "pytorch_model.bin": b"x", "modeling.py": b"x"},
        "org/nothing": {"README.md": b"card"},
        "org/adapter": adapter_files(),
        "org/model": model_files(),
        "org/embedding": {**model_files(), "model.safetensors": safetensors(1000, tensor="layers.0.weight")},
        "org/file": {"a.safetensors": safetensors(1000), "a.gguf": GGUF},
    }
    with serving(Hub(repos)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "5")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


@pytest.fixture
def run(hub: Hub, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        """The exit code, the standard output and the standard error of a command."""
        code = main(list(args))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def result_of(run: Run, *args: str) -> tuple[int, Any]:
    code, out, err = run(*args, "--json")
    return code, json.loads(out or err.splitlines()[-1])


def listed(run: Run) -> dict[str, str]:
    """The id and the problem of each model in the list, without guide."""
    code, models = result_of(run, "list")
    assert code == 0
    return {model["id"]: model["problem"] for model in models if not model["bundled"]}


def test_repository_with_only_gguf_files_is_inspected(run: Run) -> None:
    _, result = result_of(run, "inspect", "org/gguf")
    assert (result["name"], result["kind"], result["architecture"]) == ("org/gguf:Q4_K_M", "gguf", "llama")
    assert (result["context"], result["quantization"]) == (512, "Q4_K_M")
    variants = {variant["quant"]: variant["bytes"] for variant in result["variants"]}
    assert variants == {"Q4_K_M": sum(map(len, shards().values())), "Q8_0": len(GGUF)}
    verdicts = {verdict["backend"]: verdict for verdict in result["backends"]}
    assert "reads no GGUF files" in verdicts["cpu"]["says"]
    _, out, _ = run("inspect", "org/gguf:q8_0")
    assert "variants       Q8_0" in out
    assert "F32 16 B in 1 tensor)" in out


def test_repository_with_only_pickle_weights_is_inspected(run: Run) -> None:
    code, result = result_of(run, "inspect", "org/pickle")
    assert (code, result["kind"], result["architecture"], result["usable"]) == (5, "model", "qwen3", False)
    assert (result["pickles"], result["code"]) == (["pytorch_model.bin"], ["modeling.py"])
    assert "only pickle weights" in result["problems"][0]
    code, error = result_of(run, "inspect", "org/nothing")
    assert (code, error["error"]["code"]) == (5, "model_unusable")


def test_single_weight_file_is_inspected_by_its_address(run: Run, hub: Hub) -> None:
    address = f"{hub.url}/org/file/resolve/main/a.safetensors"
    code, result = result_of(run, "inspect", address)
    assert (code, result["name"], result["kind"], result["usable"]) == (5, address, "model", False)
    assert (result["bytes"], result["parameters"]) == (1000, 1000)
    assert "without config.json" in result["problems"][0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/pickle", "only pickle weights"),
        ("org/adapter", "org/adapter is an adapter"),
        ("{hub}/org/file/resolve/main/a.safetensors", "weights without config.json"),
    ],
)
def test_fit_refuses_other_kinds_by_name(run: Run, hub: Hub, name: str, words: str) -> None:
    code, error = result_of(run, "fit", name.replace("{hub}", hub.url))
    assert code == 5
    assert words in error["error"]["message"]
    assert "/tmp" not in error["error"]["message"]
    assert "localllm-inspect" not in error["error"]["message"]


def snapshot_files() -> set[str]:
    return {path.name for path in paths.hub_cache_dir().rglob("snapshots/*/**/*") if path.is_file()}


def test_gguf_model_is_downloaded_with_all_shards(run: Run, hub: Hub) -> None:
    code, _, errors = run("pull", "org/gguf:q4_k_m", "--yes")
    assert (code, listed(run)) == (0, {"org/gguf:Q4_K_M": None}), errors
    assert "try: localllm run org/gguf:Q4_K_M" in errors
    assert snapshot_files() == {*(name.rpartition("/")[2] for name in shards()), "README.md"}
    assert snapshot_download("org/gguf", cache_dir=paths.hub_cache_dir(), local_files_only=True)
    model = resolved.model("org/gguf")
    assert model.path.name == "m-Q4_K_M-00001-of-00002.gguf"
    assert model.is_complete


def test_repository_with_only_gguf_files_has_a_default_model(run: Run) -> None:
    code, _, errors = run("pull", "org/gguf", "--yes")
    assert code == 0, errors
    assert "chose org/gguf:Q4_K_M; it also has Q8_0" in errors
    assert listed(run) == {"org/gguf:Q4_K_M": None}


def test_name_without_a_selector_prefers_safetensors(run: Run) -> None:
    assert run("pull", "org/both", "--yes")[0] == 0
    assert run("pull", "org/both:Q8_0", "--yes")[0] == 0
    assert set(listed(run)) == {"org/both", "org/both:Q8_0"}
    assert (resolved.model("org/both").path / "config.json").exists()
    assert resolved.model("org/both:Q8_0").path.name == "m-Q8_0.gguf"
    assert run("rm", "org/both:Q8_0", "--yes")[0] == 0
    assert set(listed(run)) == {"org/both"}


def test_model_without_a_quantisation_in_its_name_has_the_name_of_the_repository(run: Run) -> None:
    assert run("pull", "org/single", "--yes")[0] == 0
    assert listed(run) == {"org/single": None}
    assert resolved.model("org/single").path.name == "model.gguf"


def test_list_shows_architecture_and_context(run: Run) -> None:
    assert run("pull", "org/gguf:Q8_0", "--yes")[0] == 0
    [entry] = [entry for entry in result_of(run, "list")[1] if not entry["bundled"]]
    assert (entry["description"], entry["context"], entry["size"]) == ("llama, GGUF Q8_0", 512, len(GGUF))


def test_download_without_llama_cpp_says_how_to_install_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "", NOT_INSTALLED)
    code, _, errors = run("pull", "org/gguf:Q8_0", "--yes")
    assert code == 0
    assert f"it cannot be used: {NOT_INSTALLED}" in errors
    assert listed(run) == {"org/gguf:Q8_0": NOT_INSTALLED}
    _, facts = result_of(run, "show", "org/gguf:Q8_0")
    assert facts["problems"] == [NOT_INSTALLED]
    monkeypatch.setattr(backends.load("llamacpp"), "probe", lambda: Unavailable("llamacpp", NOT_INSTALLED))
    for name in ("org/gguf:Q8_0", "org/gguf:Q4_K_M"):
        code, inspection = result_of(run, "inspect", name)
        assert (code, inspection["problems"]) == (5, [f"backend llamacpp is unavailable: {NOT_INSTALLED}"])
        [cpu] = [verdict["says"] for verdict in inspection["backends"] if verdict["backend"] == "cpu"]
        assert "GGUF" in cpu


def test_list_has_the_command_that_installs_llama_cpp(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "", NOT_INSTALLED, "pip install it")
    for name in ("org/gguf:Q8_0", "org/gguf:Q4_K_M"):
        assert run("pull", name, "--yes")[0] == 0
    for wait in (True, False):  # the answers of a process, and the remembered ones
        commands = [model.install for model in listing.listed(wait=wait)]
        assert sorted(commands) == ["", "pip install it", "pip install it"]
        assert ggufs.need_llamacpp(commands) == "2 GGUF models need llama.cpp: pip install it"


def test_line_about_llama_cpp_counts_the_models() -> None:
    assert ggufs.need_llamacpp([]) == ggufs.need_llamacpp(["", ""]) == ""
    assert ggufs.need_llamacpp(["", "make build"]) == "1 GGUF model needs llama.cpp: make build"


def test_list_has_one_line_for_all_models_without_llama_cpp(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "", NOT_INSTALLED, "make it")
    assert run("pull", "org/gguf:Q8_0", "org/gguf:Q4_K_M", "--yes")[0] == 0
    _, out, errors = run("list")
    assert [line.split()[-4:-2] for line in out.splitlines() if "org/gguf" in line] == [["!", "llama,"]] * 2
    assert [line for line in errors.splitlines() if "llama" in line] == ["2 GGUF models need llama.cpp: make it"]


def test_model_that_no_backend_runs_is_refused_before_its_weights(
    run: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "llamacpp: bert is an encoder", "")
    code, _, errors = run("pull", "org/bert", "--yes")
    assert (code, listed(run)) == (5, {})
    assert "bert is an encoder" in errors
    assert run("pull", "org/bert", "--yes", "--anyway")[0] == 0
    assert listed(run) == {"org/bert:Q8_0": "llamacpp: bert is an encoder"}


def test_hostile_model_is_refused_before_its_weights(run: Run, hub: Hub) -> None:
    hub.repos["org/gguf"]["m-Q8_0.gguf"] = GGUF[:-20]
    code, _, errors = run("pull", "org/gguf:Q8_0", "--yes")
    assert (code, listed(run)) == (5, {})
    assert "is not a valid GGUF file" in errors


def test_stored_gguf_model_is_shown_verified_and_deleted(run: Run) -> None:
    assert run("pull", "org/gguf:Q4_K_M", "--yes")[0] == 0
    for name in ("org/gguf", "org/gguf:Q4_K_M"):
        code, facts = result_of(run, "show", name)
        assert (code, facts["id"], facts["kind"], len(facts["files"])) == (0, "org/gguf:Q4_K_M", "gguf", 3)
        assert (facts["description"], facts["context"], facts["problems"]) == ("llama, GGUF Q4_K_M", 512, [])
        assert facts["backend"] == "llamacpp: GGUF files go to llama.cpp"
        assert (facts["template"]["status"], facts["repository"]) == ("missing", "org/gguf")
        assert run("verify", name)[0] == 0
        _, inspection = result_of(run, "inspect", name)
        assert (inspection["local"], inspection["architecture"]) == (True, "llama")
    assert run("rm", "org/gguf:Q8_0", "--yes")[0] == 3
    assert run("rm", "org/gguf:Q4_K_M", "--yes")[0] == 0
    assert listed(run) == {}
    assert not list(paths.hub_cache_dir().glob("models--*")), "no other weights were in the repository"


def test_models_of_one_repository_are_deleted_one_by_one(run: Run) -> None:
    for quant in ("Q4_K_M", "Q8_0"):
        assert run("pull", f"org/gguf:{quant}", "--yes")[0] == 0
    assert set(listed(run)) == {"org/gguf:Q4_K_M", "org/gguf:Q8_0"}
    assert len(result_of(run, "show", "org/gguf:Q8_0")[1]["files"]) == 2, "the other model does not count"
    _, inspection = result_of(run, "inspect", "org/gguf:Q8_0")
    assert (inspection["bytes"], len(inspection["variants"])) == (16, 2)
    assert run("rm", "org/gguf:Q4_K_M", "--yes")[0] == 0
    assert listed(run) == {"org/gguf:Q8_0": None}
    assert snapshot_files() == {"m-Q8_0.gguf", "README.md"}
    assert run("verify", "org/gguf")[0] == 0
    assert result_of(run, "prune", "--dry-run", "--all")[1]["unused"] == []
    assert run("rm", "org/gguf", "--yes")[0] == 0
    assert listed(run) == {}


def test_model_with_a_missing_shard_is_listed_with_its_problem(run: Run) -> None:
    assert run("pull", "org/gguf:Q4_K_M", "--yes")[0] == 0
    resolved.model("org/gguf").path.with_name("m-Q4_K_M-00002-of-00002.gguf").unlink()
    assert listed(run) == {"org/gguf:Q4_K_M": "shard m-Q4_K_M-00002-of-00002.gguf is missing"}
    assert finding.find_model("org/gguf:Q4_K_M") is None
    assert run("pull", "org/gguf:Q4_K_M", "--yes")[0] == 0
    assert listed(run) == {"org/gguf:Q4_K_M": None}


def test_other_quantisation_is_not_the_name_of_an_adapter(run: Run) -> None:
    assert run("pull", "org/gguf:Q8_0", "--yes")[0] == 0
    adapters: Any = SimpleNamespace(has=lambda name: name == "steps")
    names = Names({}, adapters)
    with pytest.raises(ModelNotFound, match="'org/gguf:Q5_K_M' is not on this machine") as missing:
        asyncio.run(names.select("org/gguf:Q5_K_M", local=False))
    assert missing.value.hint == "did you mean org/gguf:Q8_0? to download it: localllm pull org/gguf:Q5_K_M"
    for name, adapter in (("org/gguf:q8_0", ""), ("org/gguf:Q8_0:steps", "steps"), ("org/gguf:steps", "steps")):
        model, selected = asyncio.run(names.select(name, local=False))
        assert (model.id, selected) == ("org/gguf:Q8_0", adapter)


def test_aliases_and_settings_of_a_gguf_model(run: Run) -> None:
    assert run("pull", "org/gguf:Q8_0", "--yes")[0] == 0
    assert run("alias", "small", "org/gguf:Q8_0")[0] == 0
    assert resolved.model("small").id == "org/gguf:Q8_0"
    assert run("config", "small", "context=256")[0] == 0
    assert result_of(run, "show", "org/gguf:Q8_0")[1]["settings"] == {"context": 256}


def test_gguf_file_of_another_host_is_a_model(run: Run, hub: Hub) -> None:
    address = f"{hub.url}/org/file/resolve/main/a.gguf"
    code, _, errors = run("pull", address, "--yes")
    assert code == 0, errors
    [id] = listed(run)
    assert id.startswith("local/a-")
    assert resolved.model(address).path == resolved.model(id).path
    assert run("rm", id, "--yes")[0] == 0


def test_gguf_adapter_is_pulled_and_listed_among_the_adapters(run: Run) -> None:
    code, _, errors = run("pull", "org/lora", "--yes")
    assert code == 0, errors
    assert "try: localllm adapters load org/lora" in errors
    assert listed(run) == {}
    adapters = snapshots.adapters()
    assert resolved.adapter("org/lora").path.name == "lora-f16.gguf"
    assert [adapter.id for adapter in adapters if not adapter.bundled] == ["org/lora:F16"]
    assert finding.find_model("org/lora") is None, "an adapter is no model"
    assert result_of(run, "show", "org/lora")[1]["kind"] == "adapter"
    code, inspection = result_of(run, "inspect", "org/lora")
    assert (code, inspection["kind"], inspection["base"], inspection["rank"]) == (0, "adapter", "org/base", 2)
    [folder] = [folder for folder in folders() if not folder.bundled]
    assert (folder.base, folder.rank, folder.size) == ("org/base", 2, len(ADAPTER))
    assert "org/base" in run("adapters", "list")[1]
    assert run("adapters", "rm", "org/lora", "--yes")[0] == 0


def test_gguf_files_of_this_machine_are_imported(run: Run, tmp_path: Path) -> None:
    for name, shard in shards().items():
        (tmp_path / name.rpartition("/")[2]).write_bytes(shard)
    (tmp_path / "other-Q8_0.gguf").write_bytes(GGUF)
    code, _, errors = run("import", str(tmp_path))
    assert code == 5
    assert "has 2 GGUF models" in errors
    assert run("import", str(tmp_path / "other-Q8_0.gguf"))[0] == 0
    assert run("import", str(tmp_path / "m-Q4_K_M-00002-of-00002.gguf"), "--name", "sharded", "--copy")[0] == 0
    assert listed(run) == {"local/other-Q8_0": None, "local/sharded": None}
    assert len(result_of(run, "show", "local/sharded")[1]["files"]) == 2
    assert run("rm", "local/other-Q8_0", "--yes")[0] == 0
    assert (tmp_path / "other-Q8_0.gguf").exists(), "the file of the user stays"


def test_folder_without_a_single_gguf_model_is_shown_with_this_problem(run: Run, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(GGUF)
    code, facts = result_of(run, "show", str(tmp_path))
    assert (code, len(facts["files"])) == (0, 2)
    assert facts["problems"] == [f"{tmp_path} has 2 GGUF models; name one of the files: a.gguf, b.gguf"]
    folder = tmp_path / "projector"
    folder.mkdir()
    (folder / "mmproj-F16.gguf").write_bytes(GGUF)
    assert "is not a model folder" in result_of(run, "show", str(folder))[1]["problems"][0]


def test_path_of_a_gguf_file_is_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shard in shards().items():
        (tmp_path / name.rpartition("/")[2]).write_bytes(shard)
    second = tmp_path / "m-Q4_K_M-00002-of-00002.gguf"
    for path in (tmp_path, second):
        found = resolved.model(str(path), allow_path=True)
        assert (found.id, found.path.name) == (str(path), "m-Q4_K_M-00001-of-00002.gguf")
    monkeypatch.chdir(tmp_path.parent)
    short = f"{tmp_path.name}/{second.name}"
    assert result_of(run, "show", short)[1]["id"] == str(second), "a file needs no leading ./"
    (tmp_path / "m-Q4_K_M-00001-of-00002.gguf").unlink()
    with pytest.raises(ModelNotFound, match=r"shards are missing: m-Q4_K_M-00001-of-00002\.gguf"):
        resolved.model(str(second), allow_path=True)
    (tmp_path / "lora.gguf").write_bytes(ADAPTER)
    with pytest.raises(WrongKind, match="is an adapter"):
        resolved.model(str(tmp_path / "lora.gguf"), allow_path=True)
    assert resolved.adapter(str(tmp_path / "lora.gguf"), allow_path=True).path.name == "lora.gguf"


def test_inspection_of_a_quantisation_is_not_that_of_another_one_on_this_machine(run: Run) -> None:
    assert run("pull", "org/gguf:Q8_0", "--yes")[0] == 0
    page = "https://huggingface.co/org/gguf/blob/main"
    for name in ("org/gguf:Q4_K_M", f"{page}/Q4_K_M/m-Q4_K_M-00001-of-00002.gguf"):
        _, inspection = result_of(run, "inspect", name)
        assert (inspection["local"], inspection["kind"]) == (False, "gguf"), name
    assert result_of(run, "inspect", f"{page}/m-Q8_0.gguf")[1]["local"]


def test_file_of_another_host_is_listed_shown_verified_and_deleted(run: Run, hub: Hub) -> None:
    address = f"{hub.url}/org/file/resolve/main/a.safetensors"
    code, _, errors = run("pull", address, "--yes")
    assert code == 5
    assert "--anyway" in errors
    code, _, errors = run("pull", address, "--yes", "--anyway")
    assert code == 0, errors
    assert "it cannot be used: weights without config.json" in errors
    [(id, problem)] = listed(run).items()
    assert "without config.json" in problem
    for name in (id, address):
        code, facts = result_of(run, "show", name)
        assert (code, facts["id"], facts["kind"]) == (0, id, "weights")
        assert run("verify", name)[0] == 0
        assert result_of(run, "inspect", name)[1]["local"]
    assert run("rm", id, "--yes")[0] == 0
    assert listed(run) == {}


def test_model_without_the_tensors_of_its_architecture_is_refused(run: Run, hub: Hub) -> None:
    """An embedding model has the config.json of a language model, and names of tensors without `model.`."""
    code, _, errors = run("pull", "org/embedding", "--yes")
    assert code == 5
    assert "tensor model.embed_tokens.weight is missing" in errors
    assert listed(run) == {}
    code, result = result_of(run, "inspect", "org/embedding")
    assert (code, result["usable"], result["choice"]) == (5, False, "")
    assert "not those of a qwen3 language model" in result["problems"][0]
    assert not any(verdict["runs"] for verdict in result["backends"])
    assert run("fit", "org/embedding")[0] == 5
    assert run("pull", "org/embedding", "--yes", "--anyway")[0] == 0
    assert "model.embed_tokens.weight" in listed(run)["org/embedding"]


def test_settings_of_a_repository_apply_to_its_gguf_models(run: Run) -> None:
    run("pull", "org/gguf:Q8_0")
    run("pull", "org/gguf")
    _, result = result_of(run, "config", "org/gguf", "context=64", "cache_dtype=q8_0")
    assert (result["model"], result["settings"]) == ("org/gguf", {"context": 64, "cache_dtype": "q8_0"})
    _, result = result_of(run, "config", "org/gguf:q8_0", "context=128")
    assert (result["model"], result["settings"]) == ("org/gguf:Q8_0", {"context": 128})
    assert result["inherited"] == {"cache_dtype": "q8_0"}
    assert "cache_dtype  q8_0   of its repository" in run("config", "org/gguf:Q8_0")[1]
    for name, context in (("org/gguf:Q4_K_M", 64), ("org/gguf:Q8_0", 128)):
        loaded = load_settings(config.load(), name, LoadFlags())
        assert (loaded.context, loaded.cache_dtype) == (context, "q8_0")
        assert result_of(run, "show", name)[1]["settings"] == {"context": context, "cache_dtype": "q8_0"}


@pytest.mark.parametrize("command", ["chat", "run", "show", "inspect", "fit", "verify", "config", "adapters load"])
def test_name_of_a_folder_gets_the_path_as_its_hint(
    command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "q" / "two"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(GGUF)
    arguments = [*command.split(), "q/two", *(["hi"] if command == "run" else [])]
    code, _, err = run(*arguments)
    assert code in (3, 10)
    assert "hint: the folder q/two is named ./q/two; " in err
    stopped: list[str] = []
    monkeypatch.setattr("localllm.app.commands.daemon.stop", stopped.append)
    run("stop", "q/two")
    assert stopped == ["q/two"], "a loaded model may have no files"


def test_show_has_the_types_and_the_licence_of_a_gguf_model(run: Run, tmp_path: Path) -> None:
    """The metadata have the licence, otherwise the README of the repository."""
    run("pull", "org/gguf:Q8_0")
    shown = result_of(run, "show", "org/gguf:Q8_0")[1]
    assert (shown["weights"], shown["licence"]) == ([{"dtype": "F32", "tensors": 1, "bytes": 16}], "")
    readme = resolved.model("org/gguf:Q8_0").path.with_name("README.md")
    readme.unlink()
    readme.write_text("---\nlicense: mit\n---\n")
    assert result_of(run, "show", "org/gguf:Q8_0")[1]["licence"] == "mit"
    assert result_of(run, "inspect", "org/gguf:Q8_0")[1]["licence"] == "mit"
    file = tmp_path / "m.gguf"
    file.write_bytes(model({**TINY, "general.license": "apache-2.0"}))
    assert "licence     apache-2.0" in run("show", str(file))[1]


def test_list_reads_the_header_of_a_gguf_file_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next command is another process, which remembers the facts about a file that stays the same."""
    reads: list[str] = []
    read = headers.read_gguf

    def count(file: headers.Reader) -> GgufHeader:
        reads.append(file.name)
        return read(file)

    def list_in_a_new_process() -> str:
        listing._checked.cache_clear()
        headers._read_version.cache_clear()
        return run("list")[1]

    run("pull", "org/gguf:Q8_0")
    monkeypatch.setattr(headers, "read_gguf", count)
    first = list_in_a_new_process()
    reads.clear()
    assert list_in_a_new_process() == first
    assert "512      llama, GGUF Q8_0" in first
    assert reads == []
    model = resolved.model("org/gguf:Q8_0")
    os.utime(model.path, ns=(1, 1))
    list_in_a_new_process()
    assert reads == [model.path.name], "a changed file is read again"
