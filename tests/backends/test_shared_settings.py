"""Settings of all models that a backend does not support: the model is loaded without them, with a warning."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from localllm import backends
from localllm.app import paths
from localllm.backends import shared_settings
from localllm.backends.shared_settings import without_refused
from localllm.engine.errors import ContextRefused, ModelRefused, SettingRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Unavailable

SHARED = ("quant", "dtype", "max_rows", "context", "gpu_layers")


def limited(options: LoadOptions) -> LoadOptions:
    """A backend with limits, as a function that returns the options that it gets."""
    if options.quant != "none":
        raise SettingRefused("quant is not supported", setting="quant")
    if options.max_rows > 4:
        raise SettingRefused("too many rows", setting="max_rows", instead=4)
    if options.context is not None and options.context > 100:
        raise ContextRefused("m", options.context, 100)
    if options.gpu_layers is not None:
        raise SettingRefused("no layers", setting="gpu_layers")
    return options


def test_settings_of_all_models_apply_where_they_can() -> None:
    options = LoadOptions(quant="int8", dtype="float32", max_rows=9, context=300, gpu_layers=2)
    applied = without_refused(limited, "org/m", options, SHARED)
    assert applied.result == LoadOptions(quant="none", dtype="float32", max_rows=4, context=100)
    assert applied.unapplied == ("quant", "max_rows", "context", "gpu_layers")
    commands = [warning.partition("localllm config ")[2] for warning in applied.warnings]
    assert commands == ["org/m quant=none", "org/m max_rows=4", "org/m context=100", "org/m gpu_layers=-1"]
    assert applied.warnings[0].startswith("the setting quant = int8 does not apply to org/m: quant is not supported")


@pytest.mark.parametrize("options", [LoadOptions(quant="int8", max_rows=4), LoadOptions(context=101, max_rows=4)])
def test_a_setting_of_one_model_is_refused(options: LoadOptions) -> None:
    with pytest.raises((SettingRefused, ContextRefused)):
        without_refused(limited, "m", options, ("dtype",))


def test_a_setting_that_is_refused_with_its_default_too_is_refused() -> None:
    def refuse(_: LoadOptions) -> None:
        raise SettingRefused("never", setting="quant")

    with pytest.raises(SettingRefused):
        without_refused(refuse, "m", LoadOptions(quant="int8"), SHARED)


def test_the_context_of_a_model_stays_an_error_of_the_model() -> None:
    assert issubclass(ContextRefused, ModelRefused)
    assert str(ContextRefused("m", 7, 5)) == "m has a context of 5 tokens, not 7"


class TestBackend:
    @pytest.fixture(autouse=True)
    def two_backends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Backend `a` reads no files, `b` reads all, and `c` has no runner."""
        found = {
            "a": SimpleNamespace(name="a", accepts=lambda _: "not these"),
            "b": SimpleNamespace(name="b", accepts=lambda _: ""),
            "c": SimpleNamespace(name="c"),
        }

        def choose(name: str, _: object) -> Any:
            return backends.Choice(found["b" if name == "auto" else name], SimpleNamespace(), name)  # type: ignore[arg-type]

        monkeypatch.setattr(shared_settings, "load", found.get)
        monkeypatch.setattr(shared_settings, "choose", choose)

    def test_backend_of_all_models_that_cannot_read_a_model_gives_way(self) -> None:
        chosen = shared_settings.choose_for("a", SimpleNamespace(name="m"), ("backend",))  # type: ignore[arg-type]
        assert (chosen.result.backend.name, chosen.unapplied) == ("b", ("backend",))
        assert chosen.warnings[0].endswith("localllm config m backend=b")

    @pytest.mark.parametrize(
        ("name", "shared"), [("a", ()), ("b", ("backend",)), ("auto", ("backend",)), ("c", ("backend",))]
    )
    def test_other_choices_stay(self, name: str, shared: tuple[str, ...]) -> None:
        chosen = shared_settings.choose_for(name, SimpleNamespace(name="m"), shared)  # type: ignore[arg-type]
        assert (chosen.result.reason, chosen.warnings) == (name, ())


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(cache_layout="rows"),
        LoadOptions(gpu_layers=3),
        LoadOptions(rope_scaling="yarn"),
        LoadOptions(rope_scale=2.0),
        LoadOptions(rope_base=5e5),
        LoadOptions(cache_dtype="q8_0"),
        LoadOptions(graphs="full"),
        LoadOptions(lora_backend="triton"),
        LoadOptions(attention="flashinfer"),
        LoadOptions(context=100_000),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_backend_names_each_setting_that_it_lacks(backend: str, options: LoadOptions) -> None:
    module = backends.load(backend)
    if isinstance(module.probe(), Unavailable):
        pytest.skip(f"{backend} is not installed")
    files = read_model(paths.guide_dir())
    [setting] = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    with pytest.raises((SettingRefused, ContextRefused)) as refused:
        module.plan_memory(files, options)
    assert refused.value.setting == setting
    applied = without_refused(lambda options: module.plan_memory(files, options), "m", options, (setting,))
    assert applied.unapplied == (setting,)
