"""The routes of llama.cpp's server, and the routes that load and unload models."""

from __future__ import annotations

import json

import httpx

from .conftest import Daemon, events

MODEL = "test/echo"


def test_facts_about_a_loaded_model(daemon: Daemon) -> None:
    daemon.chat("echo a")
    props = httpx.get(f"{daemon.url}/props", params={"model": MODEL}).json()
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == (MODEL, 64)
    slots = httpx.get(f"{daemon.url}/slots", params={"model": MODEL}).json()
    assert len(slots) == props["total_slots"] == 64
    assert slots[0] == {"id": 0, "n_ctx": 64, "is_processing": False}
    missing = httpx.get(f"{daemon.url}/props", params={"model": "test/other"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_infill(daemon: Daemon) -> None:
    body = {"model": MODEL, "input_prefix": "body", "input_suffix": "after", "n_predict": 7, "samplers": ["top_k"]}
    response = httpx.post(f"{daemon.url}/infill", json=body)
    reply = response.json()
    frame = json.loads(reply["content"])
    assert (frame["prompt"], frame["suffix"], frame["max_tokens"]) == ("body", "after", 7)
    assert (reply["stop"], reply["stop_type"], reply["tokens_predicted"]) == (True, "eos", 1)
    assert response.headers["x-localllm-ignored"] == "samplers"
    streamed = httpx.post(
        f"{daemon.url}/infill", json=body | {"input_prefix": "echo ", "prompt": "a b", "stream": True}
    )
    *parts, last = events(streamed.text)
    assert [part["content"] for part in parts] == ["a ", "b "]
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 2)
    extra = httpx.post(f"{daemon.url}/infill", json=body | {"input_extra": [{"text": "x"}]})
    assert (extra.status_code, extra.json()["error"]["param"]) == (400, "input_extra")
    raw = httpx.post(
        f"{daemon.url}/api/generate", json={"model": MODEL, "prompt": "body", "suffix": "b", "stream": False}
    )
    assert json.loads(raw.json()["response"])["suffix"] == "b"


def test_apply_template(daemon: Daemon) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ab c"}]}
    assert httpx.post(f"{daemon.url}/apply-template", json=body).json() == {"prompt": "xx x"}


def test_load_and_unload(daemon: Daemon) -> None:
    refused = httpx.post(f"{daemon.url}/v1/models/load", json={"model": MODEL})
    assert refused.status_code == 403
    with daemon.local() as local:
        loaded = local.post("/v1/models/load", json={"model": MODEL}, timeout=100).json()
        assert (loaded["id"], loaded["state"]) == (MODEL, "ready")
        assert local.post("/v1/models/unload", json={"model": MODEL}).status_code == 200
        assert MODEL not in daemon.loaded()
        missing = local.post("/models/unload", json={"model": MODEL})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
