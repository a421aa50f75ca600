"""The frame Load, from the settings and a request."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localllm.app import config, frames, paths
from localllm.app.api.admin import LoadFlags
from localllm.app.config import Settings
from localllm.app.daemon.loading import load_frame, load_settings
from localllm.app.developer import OF_THE_DAEMON, Developer
from localllm.app.store import preferences
from localllm.app.store.local.refs import ModelRef
from localllm.engine.options import LoadOptions

REF = ModelRef("some/model", Path("/models/some"))

# A value of each load setting, and the options that then differ from the defaults.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "backend": ("cpu", {}),
    "dtype": ("bfloat16", {"dtype": "bfloat16"}),
    "cache_dtype": ("fp8", {"cache_dtype": "fp8"}),
    "cache_layout": ("rows", {"cache_layout": "rows"}),
    "quant": ("int8", {"quant": "int8"}),
    "context": (4096, {"context": 4096}),
    "cache_mib": (3, {"cache_bytes": 3 * 2**20}),
    "max_rows": (7, {"max_rows": 7}),
    "graphs": ("split", {"graphs": "split"}),
    "threads": (3, {"threads": 3}),
    "gpu_layers": (0, {"gpu_layers": 0}),
    "rope_scaling": ("yarn", {"rope_scaling": "yarn"}),
    "rope_scale": (2.0, {"rope_scale": 2.0}),
    "rope_base": (5e5, {"rope_base": 5e5}),
    "adapter_slots": (2, {"adapter_slots": 2}),
    "adapter_rank": (64, {"adapter_rank": 64}),
}
DEVELOPER: dict[str, tuple[Any, dict[str, Any]]] = {
    "compiler": ("eager", {"compiler": "eager"}),
    "attention": ("flashinfer", {"attention": "flashinfer"}),
    "lora_backend": ("torch_native", {"lora_backend": "torch_native"}),
    "streams": ("one", {"streams": "one"}),
    "weight_layout": ("plain", {"weight_layout": "plain"}),
    "prefetch": ("on", {"prefetch": "on"}),
    "ops": (("norm=reference", "rope.neox=cpp"), {"ops": ("norm=reference", "rope.neox=cpp")}),
    "self_test": ("off", {"self_test_dir": None}),
}


def received(frame: frames.Load) -> frames.Load:
    """The frame as the worker decodes it."""

    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(frames.pack(frame))
        return await frames.read_to_worker(reader)

    loaded = asyncio.run(read())
    assert isinstance(loaded, frames.Load)
    return loaded


def changed(options: LoadOptions) -> dict[str, Any]:
    plain = load_frame(REF, Settings()).options
    names = [field.name for field in fields(LoadOptions)]
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(plain, name)}


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_reaches_the_worker(name: str) -> None:
    value, expected = CHANGES[name]
    frame = received(load_frame(REF, Settings(**{name: value})))
    assert changed(frame.options) == expected
    assert frame.backend == (value if name == "backend" else "auto")


@pytest.mark.parametrize("name", DEVELOPER)
def test_each_developer_variable_reaches_the_worker(name: str) -> None:
    value, expected = DEVELOPER[name]
    settings = Settings(developer=Developer(**{name: value}))
    assert changed(received(load_frame(REF, settings)).options) == expected


def test_every_setting_is_tested() -> None:
    assert set(CHANGES) == set(config.LOADING)
    assert set(DEVELOPER) == set(Developer.__struct_fields__) - OF_THE_DAEMON


def test_default_settings_give_default_options() -> None:
    frame = received(load_frame(REF, Settings()))
    folders = {
        "packed_dir": paths.packed_dir(REF.path),
        "compiled_dir": paths.compiled_dir(),
        "self_test_dir": paths.self_test_dir(),
    }
    options = LoadOptions(**folders)
    assert frame == frames.Load(model="some/model", path="/models/some", options=options, shared=config.LOADING)


def test_flags_of_a_call_precede_the_model_and_the_daemon() -> None:
    preferences.set_settings("some/model", {"quant": "int8", "context": 64, "threads": 2})
    settings = load_settings(Settings(quant="fp8", backend="cpu"), REF.id, LoadFlags(backend="mlx", quant="int4"))
    frame = load_frame(REF, settings)
    assert (frame.backend, frame.options.quant, frame.options.context, frame.options.threads) == ("mlx", "int4", 64, 2)
    assert not {"backend", "quant", "context", "threads"} & set(frame.shared), "these hold for this load alone"
    assert "dtype" in frame.shared


@pytest.mark.parametrize("wrong", [{"quant": "int3"}, {"context": "long"}, {"packed_dir": 3}])
def test_options_of_the_wrong_type_are_refused(wrong: dict[str, Any]) -> None:
    frame = frames.Load(model="m", path="/", options=LoadOptions(**wrong))
    with pytest.raises((msgspec.ValidationError, NotImplementedError)):
        received(frame)
