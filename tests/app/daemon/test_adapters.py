"""Adapters of a real daemon with fake workers: loaded, listed, selected and unloaded over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ...waiting import wait_until
from .conftest import Daemon, environment

MODEL = "test/echo"
HI = [{"role": "user", "content": "body"}]


class Api:
    """Requests to a daemon over its unix socket."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.http = daemon.local()

    def load(self, name: str, path: object, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), "model": MODEL} | more
        return self.http.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str, **more: Any) -> httpx.Response:
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name} | more)

    def names(self) -> list[str]:
        return [entry["name"] for entry in self.http.get("/lora-adapters").json()]

    def chat(self, model: str = MODEL, **more: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"model": model, "messages": HI} | more)

    def selected(self, model: str = MODEL, **more: Any) -> tuple[str, str | None, float]:
        """The model of the answer, and adapter and scale in the frame that the worker got."""
        answer = self.chat(model, **more).json()
        frame = json.loads(answer["choices"][0]["message"]["content"])
        return answer["model"], frame.get("adapter"), frame.get("adapter_scale", 1.0)

    def worker_log(self) -> str:
        return (self.daemon.folder / "state/localllm/log/worker-test--echo.log").read_text()


@pytest.fixture
def api(daemon: Daemon) -> Iterator[Api]:
    api = Api(daemon)
    yield api
    for name in api.names():
        api.unload(name)
    api.http.close()


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    detail = response.json()["error"]
    return response.status_code, detail["code"], detail["param"]


def test_adapter_is_loaded_listed_and_unloaded(api: Api, tmp_path: Path) -> None:
    loaded = api.load("pirate", tmp_path, pinned=True)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    (entry,) = api.http.get("/lora-adapters").json()
    expected = {"name": "pirate", "model": MODEL, "path": str(tmp_path), "scale": 0.0, "pinned": True}
    files = {"version": "v", "base": "org/base", "warning": "another base model"}
    assert entry == {"id": entry["id"]} | expected | files
    cards = {card["id"]: card for card in api.http.get("/v1/models").json()["data"]}
    assert cards[f"{MODEL}:pirate"] == cards[MODEL] | {"id": f"{MODEL}:pirate", "parent": MODEL}
    assert api.http.get(f"/v1/models/{MODEL}:pirate").json() == cards[f"{MODEL}:pirate"]
    unloaded = api.unload("pirate")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'pirate' removed successfully.")
    assert api.names() == []
    assert api.http.get(f"/v1/models/{MODEL}:pirate").status_code == 404


def test_folders_on_this_machine_are_listed_with_their_rank(api: Api, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "base_model_name_or_path": "org/base"}')
    assert api.load("pirate", tmp_path).status_code == 200
    (folder,) = [entry for entry in api.http.get("/admin/adapters").json() if entry["path"] == str(tmp_path)]
    assert (folder["id"], folder["rank"], folder["base"]) == (str(tmp_path), 4, "org/base")


def test_request_selects_an_adapter(api: Api, tmp_path: Path) -> None:
    api.load("pirate", tmp_path)
    assert api.selected() == (MODEL, None, 1.0)
    assert api.selected(f"{MODEL}:pirate") == (f"{MODEL}:pirate", "pirate", 1.0)
    assert api.selected(lora=[{"name": "pirate", "scale": 0.5}]) == (f"{MODEL}:pirate", "pirate", 0.5)
    assert api.selected(lora=[]) == (MODEL, "", 1.0)
    assert api.selected("pirate") == (f"{MODEL}:pirate", "pirate", 1.0)  # as vLLM
    tokens = api.http.post("/v1/tokenize", json={"model": f"{MODEL}:pirate", "prompt": "a bc"})
    assert tokens.json()["tokens"] == [1, 2]
    completion = api.http.post("/v1/completions", json={"model": f"{MODEL}:pirate", "prompt": ["echo a", "echo b"]})
    assert completion.json()["model"] == f"{MODEL}:pirate"


def test_builtin_adapters_of_guide_need_no_load(api: Api) -> None:
    try:
        assert api.selected("guide:pirate") == ("guide:pirate", "pirate", 1.0)
        assert api.selected("guide", lora=[{"name": "steps", "scale": 2}]) == ("guide:steps", "steps", 2.0)
        assert api.names() == ["pirate", "steps"]
        assert api.load("pirate", "pirate", model="guide").status_code == 400  # it is loaded already
        assert api.load("pirate", "pirate", model="guide", reuse=True).status_code == 200
        api.unload("pirate")
        assert api.selected("guide:pirate") == ("guide:pirate", "pirate", 1.0)
        unknown = api.chat("guide:pirat")
        assert error(unknown) == (404, "adapter_not_found", "model")
        assert unknown.json()["error"]["hint"] == "did you mean pirate? loaded adapters: steps, pirate"
        assert error(api.chat(f"{MODEL}:pirate")) == (404, "adapter_not_found", "model")
    finally:
        api.http.post("/admin/unload", json={"model": "guide"})
    assert api.names() == []
    assert api.chat("guide:other").json()["error"]["hint"] == "loaded adapters: none; built in: pirate, steps"


def test_unusable_selection_is_refused_by_name(api: Api, tmp_path: Path) -> None:
    api.load("pirate", tmp_path)
    unknown = api.chat(f"{MODEL}:pirates")
    assert error(unknown) == (404, "adapter_not_found", "model")
    assert unknown.json()["error"]["hint"] == "did you mean pirate? loaded adapters: pirate"
    assert error(api.chat(f"{MODEL}:")) == (404, "model_not_found", "model")
    assert "'qwen3:0.7b'" in api.chat("qwen3:0.7b").json()["error"]["message"], "the complete name"
    assert error(api.chat(":")) == (404, "model_not_found", "model")
    assert error(api.chat("/" + "a" * 400)) == (404, "model_not_found", "model")
    assert error(api.chat(lora=[{"name": "other"}])) == (404, "adapter_not_found", "lora")
    assert error(api.http.post("/v1/tokenize", json={"model": f"{MODEL}:x", "prompt": "a"}))[0] == 404
    both = api.chat(f"{MODEL}:pirate", lora=[{"name": "pirate"}])
    assert error(both) == (400, "invalid_request", "lora")
    two = api.chat(lora=[{"name": "pirate"}, {"name": "other"}])
    assert error(two) == (400, "unsupported_parameter", "lora")
    assert "pirate, other" in two.json()["error"]["message"]
    assert error(api.chat(lora=[{"name": "pirate", "scale": 101}])) == (400, "invalid_request", "lora[0].scale")
    assert error(api.chat(lora=[{"name": "pirate", "weight": 1}])) == (400, "unsupported_parameter", "lora[0].weight")


def test_unusable_load_is_refused_by_name(api: Api, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    assert error(api.load("pirate", broken)) == (400, "adapter_unusable", "lora_path")
    assert error(api.load("pirate", tmp_path / "missing")) == (404, "adapter_not_found", "lora_path")
    assert error(api.load("pirate", "/" + "a" * 5000)) == (404, "adapter_not_found", "lora_path")
    assert error(api.load("pirate", "no/adapter")) == (404, "adapter_not_found", "lora_path")
    assert error(api.load("a:b", tmp_path)) == (400, "invalid_request", "lora_name")
    assert error(api.load("pirate", tmp_path, model="test/none"))[0] == 404
    assert error(api.unload("pirate")) == (404, "adapter_not_found", "lora_name")
    assert api.names() == []


def test_name_in_use_needs_load_inplace(api: Api, tmp_path: Path) -> None:
    assert api.load("pirate", tmp_path).status_code == 200
    again = api.load("pirate", tmp_path)
    assert error(again) == (400, "invalid_request", "lora_name")
    assert "load_inplace" in again.json()["error"]["hint"]
    other = tmp_path / "other"
    other.mkdir()
    assert api.load("pirate", other, load_inplace=True).status_code == 200
    assert [entry["path"] for entry in api.http.get("/lora-adapters").json()] == [str(other)]
    broken = tmp_path / "broken"
    broken.mkdir()
    assert api.load("pirate", broken, load_inplace=True).status_code == 400
    assert [entry["path"] for entry in api.http.get("/lora-adapters").json()] == [str(other)]


def test_same_adapter_may_be_loaded_again_with_reuse(api: Api, tmp_path: Path) -> None:
    assert api.load("pirate", tmp_path, pinned=True).status_code == 200
    before = api.http.get("/lora-adapters").json()
    assert api.load("pirate", tmp_path, reuse=True).status_code == 200
    assert api.http.get("/lora-adapters").json() == before
    other = tmp_path / "other"
    other.mkdir()
    assert error(api.load("pirate", other, reuse=True)) == (400, "invalid_request", "lora_name")
    assert api.load("new", other, reuse=True).status_code == 200
    assert api.names() == ["pirate", "new"]


def test_default_scales(api: Api, tmp_path: Path) -> None:
    for name in ("pirate", "poet"):
        api.load(name, tmp_path)
    first, second = (entry["id"] for entry in api.http.get("/lora-adapters").json())

    def scale(*entries: dict[str, Any]) -> httpx.Response:
        return api.http.post("/lora-adapters", json=list(entries))

    reply = scale({"id": second, "scale": 0.5})
    assert [entry["scale"] for entry in reply.json()] == [0.0, 0.5]
    assert api.selected() == (f"{MODEL}:poet", "poet", 0.5)
    assert api.selected(lora=[]) == (MODEL, "", 1.0)
    assert api.selected(f"{MODEL}:pirate") == (f"{MODEL}:pirate", "pirate", 1.0)
    both = scale({"id": first, "scale": 1}, {"id": second, "scale": 1})
    assert error(both) == (400, "invalid_request", "scale")
    assert scale({"id": 999, "scale": 1}).status_code == 404
    assert error(scale({"id": first, "scale": 101})) == (400, "invalid_request", "scale")
    assert error(scale({"id": first})) == (400, "invalid_request", "[0]")
    assert api.selected() == (f"{MODEL}:poet", "poet", 0.5)  # a refused change changes nothing
    assert scale().status_code == 200
    assert api.selected() == (MODEL, None, 1.0)


def test_tcp_client_needs_the_admin_right(daemon: Daemon, tmp_path: Path) -> None:
    body = {"lora_name": "pirate", "lora_path": str(tmp_path)}
    assert daemon.http.post(f"{daemon.url}/v1/load_lora_adapter", json=body).status_code == 403
    assert daemon.http.post(f"{daemon.url}/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 403
    assert daemon.http.get(f"{daemon.url}/lora-adapters").status_code == 403
    assert daemon.http.get(f"{daemon.url}/admin/adapters").status_code == 403
    assert daemon.http.post(f"{daemon.url}/lora-adapters", json=[]).status_code == 403


def test_tcp_client_with_key_names_no_folder(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(api_key="secret")
    snapshot = daemon.folder / "hub/models--org--pirate/snapshots/0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text("{}")
    (snapshot / "adapter_model.safetensors").write_bytes(b"")
    (daemon.folder / "hub/models--org--pirate/refs").mkdir()
    (daemon.folder / "hub/models--org--pirate/refs/main").write_text("0123456789abcdef")
    headers = {"authorization": "Bearer secret"}

    def load(path: str) -> httpx.Response:
        body = {"lora_name": "pirate", "lora_path": path, "model": MODEL}
        return daemon.http.post(f"{daemon.url}/v1/load_lora_adapter", json=body, headers=headers)

    for path in (str(tmp_path), "../pirate", "~/pirate"):
        assert error(load(path)) == (403, "forbidden", None), path
    assert load("org/../../pirate").status_code == 404
    assert load("org/pirat").json()["error"]["hint"] == "did you mean org/pirate or pirate?"
    assert load("org/pirate").status_code == 200


def test_adapters_return_after_a_crash_but_not_after_unload(api: Api, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("pirate", "poet")}
    for name, folder in folders.items():
        folder.mkdir()
        api.load(name, folder)
    before = api.worker_log().count("loading adapter pirate")
    pid = api.daemon.loaded()[MODEL]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: MODEL not in api.daemon.loaded())
    folders["poet"].rename(tmp_path / "broken")  # the fake worker refuses this path
    assert api.selected(f"{MODEL}:pirate") == (f"{MODEL}:pirate", "pirate", 1.0)
    wait_until(lambda: api.worker_log().count("loading adapter pirate") == before + 1)
    assert api.names() == ["pirate", "poet"]
    assert api.http.post("/admin/unload", json={"model": MODEL}).status_code == 200
    assert api.names() == []
    assert error(api.chat(f"{MODEL}:pirate")) == (404, "adapter_not_found", "model")


def test_adapters_return_after_an_idle_unload(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(idle_unload=0.2)
    api = Api(daemon)
    assert api.load("pirate", tmp_path).status_code == 200
    wait_until(lambda: not daemon.loaded())
    assert api.names() == ["pirate"]
    assert api.selected(f"{MODEL}:pirate") == (f"{MODEL}:pirate", "pirate", 1.0)
    assert api.worker_log().count("loading adapter pirate") == 2
    api.http.close()


def test_model_of_an_adapter_must_be_clear(api: Api, tmp_path: Path) -> None:
    api.load("pirate", tmp_path)
    api.load("pirate", tmp_path, model="test/other")
    assert error(api.chat("pirate")) == (400, "invalid_request", "model")
    assert error(api.unload("pirate")) == (400, "invalid_request", "model")
    assert error(api.load("poet", tmp_path, model=None)) == (400, "invalid_request", "model")
    assert api.unload("pirate", model="test/other").status_code == 200
    assert api.unload("pirate").status_code == 200
    assert api.http.post("/admin/unload", json={"model": "test/other"}).status_code == 200


def cli(daemon: Daemon, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localllm.app.cli", *args]
    return subprocess.run(command, env=daemon.env, input="", capture_output=True, text=True, timeout=100)


def test_commands_load_list_use_and_unload(api: Api, tmp_path: Path) -> None:
    daemon = api.daemon
    folder = tmp_path / "pirate"
    folder.mkdir()
    loaded = cli(daemon, "adapters", "load", str(folder), "--model", MODEL, "--pin", "--json")
    assert loaded.returncode == 0, loaded.stderr
    entry = json.loads(loaded.stdout)
    assert (entry["name"], entry["model"], entry["path"], entry["pinned"]) == ("pirate", MODEL, str(folder), True)
    again = cli(daemon, "adapters", "load", str(folder), "--model", MODEL)
    assert (again.returncode, f"{MODEL}:pirate is loaded and ready" in again.stderr) == (0, True)
    other = cli(daemon, "adapters", "load", str(tmp_path), "--name", "pirate", "--model", MODEL)
    assert (other.returncode, "--replace" in other.stderr) == (2, True)
    listed = cli(daemon, "adapters", "list", "--json")
    assert json.loads(listed.stdout)["loaded"] == [entry]
    table = cli(daemon, "adapters", "list")
    assert f"{MODEL}:pirate" in table.stdout
    assert "steps (built in)" in table.stdout
    assert f"warning: {MODEL}:pirate: another base model" in table.stderr
    answer = cli(daemon, "run", MODEL, "body", "--adapter", "pirate=0.5")
    frame = json.loads(answer.stdout)
    assert (frame["adapter"], frame["adapter_scale"]) == ("pirate", 0.5)
    assert json.loads(cli(daemon, "run", f"{MODEL}:pirate", "body").stdout)["adapter"] == "pirate"
    unknown = cli(daemon, "run", MODEL, "body", "--adapter", "pirat")
    assert (unknown.returncode, "did you mean pirate?" in unknown.stderr) == (3, True)
    assert cli(daemon, "adapters", "unload", "pirate").returncode == 0
    assert cli(daemon, "adapters", "unload", "pirate").returncode == 3
    assert api.names() == []


def test_commands_without_a_daemon(short_folder: Callable[[], Path]) -> None:
    folder = short_folder()
    env = environment(folder)
    command = [sys.executable, "-m", "localllm.app.cli", "adapters"]
    listed = subprocess.run([*command, "list", "--json"], env=env, capture_output=True, text=True)
    assert (listed.returncode, json.loads(listed.stdout)["loaded"]) == (0, [])
    assert [(file["id"], file["base"]) for file in json.loads(listed.stdout)["files"]] == [
        ("pirate", "guide"),
        ("steps", "guide"),
    ]
    unloaded = subprocess.run([*command, "unload", "pirate"], env=env, capture_output=True, text=True)
    assert unloaded.returncode == 8
