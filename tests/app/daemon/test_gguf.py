"""A GGUF file from a chat request to its answer: daemon, worker and llama.cpp."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm.app import paths
from localllm.app.daemon.process import COMMAND
from localllm.engine.files.model_files import read_model
from tests.backends.gguf_models import write_adapter, write_canary, write_guide

from .conftest import Daemon, events

TOOL = {
    "type": "function",
    "function": {"name": "greet", "parameters": {"type": "object", "properties": {"name": {"enum": ["Ann"]}}}},
}


@pytest.fixture(scope="module")
def file(short_folder: Callable[[], Path]) -> Path:
    return write_guide(short_folder() / "gguf" / "guide.gguf")


@pytest.fixture(scope="module")
def client(file: Path) -> Iterator[httpx.Client]:
    """A client of a daemon. The model cache of this daemon has a repository with the file."""
    folder = file.parents[1]
    repo = folder / "hub" / "models--test--guide-GGUF"
    snapshot = repo / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123456789abcdef")
    shutil.copy(file, snapshot / "guide-F32.gguf")
    env = {"TEST_WORKER": json.dumps(COMMAND), "OMP_NUM_THREADS": "1"}
    daemon = Daemon(folder, env=env, cache_mib=16, max_rows=4, threads=1)
    assert daemon.url
    with daemon.local() as local:
        local.timeout = httpx.Timeout(100)
        local.headers["x-model"] = str(file)  # the default model of `body`
        yield local
    code = daemon.stop()
    assert code == 0, daemon.log
    assert "Traceback" not in daemon.log, daemon.log


def body(client: httpx.Client, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the command to download a model?"}]
    return {"model": client.headers["x-model"], "messages": messages, "temperature": 0, "max_tokens": 24} | more


def post(client: httpx.Client, **more: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=body(client, **more))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_file_answers(client: httpx.Client) -> None:
    answer = post(client)
    assert "localllm pull" in answer["choices"][0]["message"]["content"]
    (model,) = client.get("/admin/loaded").json()
    assert model["backend"] == "llamacpp"


def test_a_streamed_answer_is_the_same(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=body(client, stream=True))
    chunks = [event["choices"][0]["delta"].get("content", "") for event in events(response.text) if event["choices"]]
    assert "".join(chunks) == post(client)["choices"][0]["message"]["content"]
    assert len([chunk for chunk in chunks if chunk]) > 3


def test_tools_and_schemas_work(client: httpx.Client) -> None:
    answer = post(client, tools=[TOOL], tool_choice="required", max_tokens=64)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "greet"
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = post(client, response_format=form, max_tokens=80)
    assert json.loads(answer["choices"][0]["message"]["content"])["x"] in (1, 2)


def test_a_repository_answers_by_its_quantisation(client: httpx.Client) -> None:
    answer = post(client, model="test/guide-GGUF:F32")
    assert answer["choices"] == post(client)["choices"]


def test_an_adapter_changes_the_answers_as_in_the_format_of_peft(file: Path, client: httpx.Client) -> None:
    adapter = write_adapter(file.with_name("ship.gguf"), "qwen3", paths.builtin_adapters_dir() / "pirate")
    bodies = {"lora_name": "ship", "lora_path": str(adapter), "model": str(file)}
    assert client.post("/v1/load_lora_adapter", json=bodies).status_code == 200
    changed = post(client, lora=[{"name": "ship"}])["choices"][0]["message"]["content"]
    assert changed.startswith("Ahoy!")
    expected = post(client, model="guide", lora=[{"name": "pirate"}])
    assert changed == expected["choices"][0]["message"]["content"]
    assert not post(client)["choices"][0]["message"]["content"].startswith("Ahoy!")


def test_a_damaged_file_is_refused_with_the_reason(file: Path, client: httpx.Client) -> None:
    damaged = file.parents[1] / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:-1000])
    response = client.post("/v1/chat/completions", json=body(client, model=str(damaged)))
    assert response.status_code == 422, response.text
    assert "damaged.gguf is not a valid GGUF file" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def shards(file: Path) -> list[Path]:
    """guide in three files."""
    tensors = len(read_model(file).tensors)
    first = write_guide(file.parents[1] / "shards" / "guide.gguf", shard_tensors=-(-tensors // 3))
    shards = sorted(first.parent.iterdir())
    assert [shard.name for shard in shards] == [f"guide-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    return shards


def test_a_model_in_shards_answers(shards: list[Path], client: httpx.Client) -> None:
    expected = post(client)["choices"]
    assert post(client, model=str(shards[0]))["choices"] == expected
    assert post(client, model=str(shards[0].parent))["choices"] == expected, "the folder names the model"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_named(missing: int, shards: list[Path], client: httpx.Client) -> None:
    folder = shards[0].parents[1] / f"without-{missing}"
    folder.mkdir()
    present = [shard for index, shard in enumerate(shards) if index != missing]
    for shard in present:
        (folder / shard.name).symlink_to(shard)
    for model in (folder, folder / present[0].name):
        response = client.post("/v1/chat/completions", json=body(client, model=str(model)))
        assert response.status_code in (404, 422), response.text
        assert "missing" in response.json()["error"]["message"]
        assert shards[missing].name in response.text


def test_a_shard_of_another_model_is_refused(shards: list[Path], client: httpx.Client) -> None:
    """The name and the numbers of the shard fit, but not its tensors."""
    folder = shards[0].parents[1] / "mixed"
    folder.mkdir()
    write_canary(folder, shard_tensors=4)
    other = sorted(folder.glob("canary-*.gguf"))
    assert len(other) == 3
    other[1].rename(folder / shards[1].name)
    for shard in (shards[0], shards[2]):
        (folder / shard.name).symlink_to(shard)
    response = client.post("/v1/chat/completions", json=body(client, model=str(folder / shards[0].name)))
    assert response.status_code == 422, response.text
    assert "tensor" in response.json()["error"]["message"]
