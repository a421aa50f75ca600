"""GGUF models, single weight files and repositories without usable weights, on every command of the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from localllm.app import paths
from localllm.app.cli import main

from ..engine.gguf_files import sound
from .hub import CONFIG, Hub, adapter_files, model_files, safetensors, serving

GGUF = sound().content()
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    q4 = {f"Q4_K_M/m-Q4_K_M-0000{number}-of-00002.gguf": GGUF for number in (1, 2)}
    repos = {
        "org/gguf": {**q4, "m-Q8_0.gguf": GGUF, "mmproj-F16.gguf": b"x", "README.md": b"card"},
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
    code, result = result_of(run, "inspect", "org/gguf")
    assert (code, result["kind"], result["architecture"], result["usable"]) == (5, "gguf", "llama", False)
    variants = {variant["quant"]: variant["bytes"] for variant in result["variants"]}
    assert variants == {"Q4_K_M": 2 * len(GGUF), "Q8_0": len(GGUF)}
    code, text, _ = run("inspect", "org/gguf:q8_0")
    assert code == 5
    assert "variants       Q8_0" in text
    assert "it reads no GGUF files" in text


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
        ("org/gguf", "only GGUF weights"),
        ("org/gguf:Q8_0", "GGUF models need the backend llamacpp"),
        ("org/pickle", "only pickle weights"),
        ("org/adapter", "org/adapter is an adapter"),
        ("{hub}/org/file/resolve/main/a.safetensors", "weights without config.json"),
        ("{hub}/org/file/resolve/main/a.gguf", "GGUF models need the backend llamacpp"),
    ],
)
def test_fit_refuses_other_kinds_by_name(run: Run, hub: Hub, name: str, words: str) -> None:
    code, error = result_of(run, "fit", name.replace("{hub}", hub.url))
    assert code == 5
    assert words in error["error"]["message"]
    assert "/tmp" not in error["error"]["message"]
    assert "localllm-inspect" not in error["error"]["message"]


def test_gguf_model_is_downloaded_with_all_shards_only_on_demand(run: Run, hub: Hub) -> None:
    code, _, errors = run("pull", "org/gguf:Q4_K_M", "--yes")
    assert (code, listed(run)) == (5, {})
    assert "GGUF models need the backend llamacpp" in errors
    assert "--anyway" in errors
    assert hub.log == [], "refused before the hub is asked"
    code, _, errors = run("pull", "org/gguf:q4_k_m", "--yes", "--anyway")
    assert code == 0, errors
    assert "it cannot be used: GGUF models need the backend llamacpp" in errors
    assert "is ready" not in errors
    names = {path.name for path in paths.hub_cache_dir().rglob("snapshots/*/**/*") if path.is_file()}
    assert names == {"m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "README.md"}
    assert snapshot_download("org/gguf", cache_dir=paths.hub_cache_dir(), local_files_only=True)


def test_stored_gguf_model_is_listed_shown_verified_and_deleted(run: Run) -> None:
    assert run("pull", "org/gguf:Q4_K_M", "--yes", "--anyway")[0] == 0
    assert "need the backend llamacpp" in listed(run)["org/gguf"]
    for name in ("org/gguf", "org/gguf:Q4_K_M"):
        code, facts = result_of(run, "show", name)
        assert (code, facts["kind"], len(facts["files"])) == (0, "gguf", 3)
        assert "llamacpp" in facts["problems"][0]
        assert run("verify", name)[0] == 0
        code, inspection = result_of(run, "inspect", name)
        assert (code, inspection["local"], inspection["architecture"]) == (5, True, "llama")
    assert run("rm", "org/gguf:Q8_0", "--yes")[0] == 3
    assert run("pull", "org/gguf:Q8_0", "--yes", "--anyway")[0] == 0
    assert len(result_of(run, "show", "org/gguf")[1]["files"]) == 4, "both models are in one snapshot"
    code, inspection = result_of(run, "inspect", "org/gguf:Q8_0")
    assert (code, inspection["bytes"] * 2 < 2 * len(GGUF), len(inspection["variants"])) == (5, True, 2)
    code, _, errors = run("rm", "org/gguf:Q4_K_M", "--yes")
    assert code == 2
    assert "org/gguf also has Q8_0" in errors
    assert run("rm", "org/gguf", "--yes")[0] == 0
    assert listed(run) == {}


def test_inspection_of_a_quantisation_is_not_that_of_another_one_on_this_machine(run: Run) -> None:
    assert run("pull", "org/gguf:Q8_0", "--yes", "--anyway")[0] == 0
    page = "https://huggingface.co/org/gguf/blob/main"
    for name in ("org/gguf:Q4_K_M", f"{page}/Q4_K_M/m-Q4_K_M-00001-of-00002.gguf"):
        code, inspection = result_of(run, "inspect", name)
        assert (code, inspection["local"], inspection["kind"]) == (5, False, "gguf"), name
    code, inspection = result_of(run, "inspect", f"{page}/m-Q8_0.gguf")
    assert (code, inspection["local"]) == (5, True)


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


def test_gguf_short_name_is_refused_before_the_hub_is_asked(run: Run, hub: Hub) -> None:
    code, _, errors = run("pull", "qwen3:8b-q4", "--yes")
    assert code == 5
    assert "GGUF models need the backend llamacpp" in errors
    assert hub.log == []


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
