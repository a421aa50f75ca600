"""Adapters from HTTP to the engine: a real worker runs the canary model, whose answers are known token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ...backends import canary
from .canary_api import LONG, MODEL, Api, answer, serve
from .conftest import events


@pytest.fixture(scope="module")
def api(short_folder: Callable[[], Path]) -> Iterator[Api]:
    yield from serve(short_folder())


def test_two_adapters_and_the_base_give_three_answers_beside_each_other(api: Api) -> None:
    api.load("one", 1)
    api.load("two", 2)
    assert len({answer(0), answer(1), answer(2)}) == 3
    expected = {"": answer(0), "one": answer(1), "two": answer(2)}
    names = [*expected] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        texts = list(pool.map(api.text, names))
    assert texts == [expected[name] for name in names]
    assert api.text(lora=[{"name": "two"}]) == answer(2)
    assert api.text(lora=[{"name": "two", "scale": 0}]) == answer(0)
    assert api.text(lora=[]) == answer(0)


def test_adapter_is_loaded_while_an_answer_runs(api: Api) -> None:
    with api.stream() as text:
        api.load("hot", 3)
        assert api.running() == 1
        assert api.text("hot") == answer(3)
        assert text() == answer(0, LONG)
    api.unload("hot")


def test_adapter_is_unloaded_while_an_answer_runs(api: Api) -> None:
    api.load("cold", 4)
    with api.stream("cold") as text:
        api.unload("cold")
        assert api.running() == 1
        refused = api.complete("cold")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "adapter_not_found")
        assert text() == answer(4, LONG)


def test_reload_under_the_same_name_uses_no_kv_of_the_version_before(api: Api) -> None:
    api.load("new", 1)
    assert api.text("new") == answer(1)
    with api.stream("new") as text:
        api.load("new", 2, load_inplace=True)
        assert api.text("new") == answer(2)
        assert text() == answer(1, LONG)
    assert api.text("new") == answer(2)
    api.unload("new")


def test_reload_of_the_model_registers_its_adapters_again(api: Api) -> None:
    api.load("stays", 2)
    api.load("lost", 3)
    api.load("changed", 4)
    (api.folder / "shift-3" / "adapter_model.safetensors").unlink()
    canary.save_adapter(api.folder / "shift-4", 1)
    assert api.text("changed") == answer(4)
    switched = api.http.post("/admin/load", json={"model": MODEL, "quant": "int8"})  # ends the worker
    assert "error" not in events(switched.text)[-1], switched.text
    assert api.text("stays") == answer(2)
    lost = api.complete("lost")
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "adapter_unusable")
    assert "has no weights" in lost.json()["error"]["message"]
    changed = api.complete("changed")
    assert (changed.status_code, changed.json()["error"]["code"]) == (400, "adapter_unusable")
    assert "the files of adapter 'changed' have changed" in changed.json()["error"]["message"]
    api.post_load("changed", api.folder / "shift-4", load_inplace=True)
    assert api.text("changed") == answer(1)
    assert api.text() == answer(0)
    for name in ("stays", "lost", "changed"):
        api.unload(name)


def test_changed_files_are_not_reused(api: Api) -> None:
    folder = api.folder / "edited"
    canary.save_adapter(folder, 1)
    api.post_load("edited", folder)
    assert api.post_load("edited", folder, reuse=True).status_code == 200
    canary.save_adapter(folder, 2)
    changed = api.post_load("edited", folder, reuse=True)
    assert (changed.status_code, changed.json()["error"]["code"]) == (400, "adapter_unusable")
    assert api.text("edited") == answer(1), "the version that was loaded goes on"
    api.unload("edited")


def test_adapter_that_does_not_fit_is_refused_with_the_reason(api: Api) -> None:
    refused = api.post_load("misfit", with_config(api.folder / "misfit", use_dora=True))
    assert refused.status_code == 400
    assert "DoRA is not supported" in refused.json()["error"]["message"]


def with_config(folder: Path, **fields: Any) -> Path:
    """An adapter with shift 1 and these fields in its configuration."""
    canary.save_adapter(folder, 1)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def test_adapter_of_another_base_model(api: Api) -> None:
    """Another family is refused. Another name of a model that the adapter fits gives a warning."""
    folder = api.folder / "base"
    refused = api.post_load("base", with_config(folder, base_model_name_or_path="org/Mistral-7B"))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "the adapter is for the base model org/Mistral-7B, but test/canary is a llama model"
    )
    for base, warning in {"org/canary-4bit": False, "org/other": True, "": False}.items():
        loaded = api.post_load("base", with_config(folder, base_model_name_or_path=base), load_inplace=True)
        assert loaded.status_code == 200, loaded.text
        (entry,) = [entry for entry in api.http.get("/lora-adapters").json() if entry["name"] == "base"]
        assert (entry["base"], "org/other" in entry["warning"]) == (base, warning)
        assert api.text("base") == answer(1)
    api.unload("base")


@pytest.mark.parametrize("operations", [8, pytest.param(125, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_random_loads_and_answers_of_eight_clients(api: Api, operations: int) -> None:
    """More adapters than slots: each client loads, replaces, unloads and uses two adapters of its own."""
    for shift in range(1, canary.KEYS):
        canary.save_adapter(api.folder / f"shift-{shift}", shift)

    def client(number: int) -> int:
        chance = random.Random(number)
        shifts: dict[str, int] = {}  # of the loaded adapters
        for _ in range(operations):
            name = f"client-{number}-{chance.randrange(2)}"
            match chance.choice(["load", "unload", "answer", "answer", "off", "base"]):
                case "load":
                    shift = chance.randrange(1, canary.KEYS)
                    body = {"lora_name": name, "lora_path": str(api.folder / f"shift-{shift}"), "model": MODEL}
                    loaded = api.http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
                    assert loaded.status_code == 200, loaded.text
                    shifts[name] = shift
                case "unload":
                    unloaded = api.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
                    assert unloaded.status_code == (200 if shifts.pop(name, None) else 404)
                case "answer" if name not in shifts:
                    assert api.complete(name).status_code == 404
                case "answer":
                    assert api.text(name) == answer(shifts[name])
                case "off" if name in shifts:
                    assert api.text(lora=[{"name": name, "scale": 0}]) == answer(0)
                case _:
                    assert api.text() == answer(0)
        for name in shifts:
            api.unload(name)
        return operations

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(client, range(8))) == 8 * operations
