"""`localllm fit`: the memory plan before a load equals the memory of the load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from localllm import backends
from localllm.app import paths
from localllm.app.cli import main
from localllm.app.store import preferences
from localllm.app.store.inspection import memory_fit as fits
from localllm.app.store.inspection.memory_fit import fit
from localllm.app.store.inspection.opening import opened
from localllm.app.store.records import Fit
from localllm.app.worker.faults import app_error
from localllm.backends import cpu, llamacpp
from localllm.engine.errors import ModelRefused, ModelTooLarge
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.memory_plan import MemoryPlan, WindowPages
from localllm.engine.options import LoadOptions
from localllm.engine.runner import DeviceInfo, Unavailable
from tests.backends.gguf_random import write_random

from ....engine.files.gguf_files import TINY
from ....engine.files.gguf_files import model as gguf_model
from ...tiny_qwen import write_model
from .test_models import Hub

SMALL = LoadOptions(max_rows=2, adapter_slots=2, adapter_rank=4)
PLAN = MemoryPlan(
    free=1000,
    weights=400,
    token_bytes=300,
    adapters=100,
    page_size=16,
    page_bytes=20,
    num_pages=5,
    max_pages=20,
    context=64,
    max_positions=128,
)


@pytest.fixture(scope="module")
def guide() -> ModelFiles:
    return read_model(paths.guide_dir())


def test_plan_adds_up() -> None:
    assert (PLAN.max_cache, PLAN.remaining) == (400, 100)
    assert PLAN.cache_bytes(17, 3) == 3 * 2 * 20
    assert PLAN.largest_context() == 128
    assert PLAN.largest_context(4) == 80
    assert PLAN.largest_context(21) == 0
    assert PLAN.fits(80, 4)
    assert not PLAN.fits(81, 4)
    assert not PLAN.fits(129)
    short = replace(PLAN, free=399)
    assert (short.fits(1), short.largest_context(), short.remaining) == (False, 0, 0)
    assert PLAN.numbers()["max_context"] == 128
    excessive = replace(PLAN, max_pages=10**6, max_positions=10**6)
    assert (excessive.max_cache, excessive.largest_context()) == (600, 30 * 16)
    assert not excessive.fits(30 * 16 + 1)


def test_windows_save_cache() -> None:
    window = WindowPages(page_bytes=15, row_pages=1, step_pages=1)
    plan = replace(PLAN, page_bytes=5, window=window, max_pages=60, max_window_pages=7)
    assert (plan.cache_bytes(32), plan.window_savings(32)) == (40, 0)
    assert (plan.cache_bytes(80), plan.window_savings(80)) == (25 + 30, 45)
    assert (plan.cache_bytes(80, 3), plan.window_savings(80, 3)) == (75 + 60, 165)
    assert (PLAN.largest_context(9), plan.largest_context(9)) == (32, 80)


def test_fit_names_what_windows_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, context=8192)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = read_model(tmp_path)
    plan = cpu.plan_memory(files, SMALL)
    runner = cpu.open(files, SMALL)
    assert [group.window for group in runner.spec.groups] == [0, 64]
    assert runner.spec.cache_bytes == plan.planned_cache
    runner.close()
    assert main(["fit", str(tmp_path), "--backend", "cpu"]) == 0
    assert "windows   save " in capsys.readouterr().out


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_plan_equals_the_load(guide: ModelFiles, quant: str) -> None:
    options = replace(SMALL, quant=quant)  # type: ignore[arg-type]
    plan = cpu.plan_memory(guide, options)
    runner = cpu.open(guide, options)
    try:
        assert runner.spec.weight_bytes == pytest.approx(plan.weights, rel=0.05)
        assert runner.spec.token_bytes == pytest.approx(plan.token_bytes, rel=0.05)
        assert runner.spec.cache_bytes == plan.num_pages * plan.page_bytes
        assert runner.spec.max_context == plan.largest_context()
    finally:
        runner.close()


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_plan_equals_the_load_on_mlx(guide: ModelFiles, quant: str) -> None:
    pytest.importorskip("mlx.core")
    pytest.importorskip("mlx_lm")
    from localllm.backends import mlx

    options = replace(SMALL, quant=quant)  # type: ignore[arg-type]
    plan = mlx.plan_memory(guide, options)
    runner = mlx.open(guide, options)
    try:
        assert runner.spec.weight_bytes == pytest.approx(plan.weights, rel=0.05)
        assert runner.spec.token_bytes == pytest.approx(plan.token_bytes, rel=0.05)
        assert runner.spec.cache_bytes == plan.num_pages * plan.page_bytes
    finally:
        runner.close()


def test_command_prints_the_fit_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The architecture of the file has a name that transformers also has, but other names of tensors."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    file = write_random(tmp_path, "qwen3")
    assert main(["fit", str(file), "--backend", "llamacpp", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)["fits"]
    assert entry["fits"]
    plan = llamacpp.plan_memory(read_model(file), LoadOptions())
    assert entry["largest_context"] == plan.largest_context() == 512
    assert entry["weights"] == plan.weights


def test_backend_of_another_format_is_no_question_of_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_model(TINY))
    main(["fit", str(file)])
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("cpu (")]
    assert line.endswith("cannot run this model: it reads no GGUF files")
    assert line != lines[0], "backends that run the model are first"
    main(["fit", str(file), "--json"])
    entries = {entry["backend"]: entry for entry in json.loads(capsys.readouterr().out)["fits"]}
    assert (entries["cpu"]["fits"], entries["cpu"]["runs"]) == (False, False)


def test_only_backend_of_a_model_is_listed_if_it_is_unavailable(
    guide: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry says how to install the backend."""
    reason = "llama-cpp-python is not installed"
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_model(TINY))
    monkeypatch.setattr(llamacpp, "probe", lambda: Unavailable("llamacpp", reason))
    monkeypatch.setattr(llamacpp, "accepts", lambda files: "" if files.gguf else "it reads only GGUF files")
    last = fit(read_model(file), LoadOptions(), backends.AUTO, 0, 1)[-1]
    assert (last.backend, last.fits, last.reason) == ("llamacpp", False, reason)
    assert "llamacpp" not in {entry.backend for entry in fit(guide, LoadOptions(), backends.AUTO, 0, 1)}


def test_refused_load_has_the_numbers_of_the_plan(guide: ModelFiles) -> None:
    options = replace(SMALL, context=2048, cache_bytes=2**20)
    plan = cpu.plan_memory(guide, options)
    with pytest.raises(ModelRefused) as refused:
        cpu.open(guide, options)
    numbers = dict(refused.value.numbers)
    free = numbers.pop("free_bytes")
    expected = plan.numbers()
    assert free == pytest.approx(expected.pop("free_bytes"), rel=0.2)
    assert numbers == expected
    error = app_error(refused.value)
    assert error is not None
    assert error.numbers == {"free_bytes": free, **numbers}


class FakeBackend:
    name = "cpu"

    def __init__(self, plan: MemoryPlan | Exception, refusal: str = "") -> None:
        self.plan = plan
        self.refusal = refusal

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "Abacus", 2000, 1000)

    def accepts(self, _: ModelFiles) -> str:
        return self.refusal

    def plan_memory(self, files: ModelFiles, options: LoadOptions) -> MemoryPlan:
        assert (options.context, options.packed_dir) == (None, None)
        if isinstance(self.plan, Exception):
            raise self.plan
        return self.plan

    def read_bandwidth(self) -> float | None:
        return 6000.0


def fit_on(backend: FakeBackend, guide: ModelFiles, monkeypatch: pytest.MonkeyPatch, context: int, rows: int) -> Fit:
    monkeypatch.setattr(fits.backends, "load", lambda _: backend)
    [result] = fit(guide, LoadOptions(context=7, packed_dir=Path("x")), "cpu", context, rows)
    return result


def test_fit_has_the_numbers_of_the_plan(guide: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit_on(FakeBackend(PLAN), guide, monkeypatch, 0, 4) == Fit(
        "cpu", "Abacus", True, "", 80, 4, 80, 1000, 400, 100, 400, 400, 100, tokens_per_second=20.0
    )
    unknown_speed = fit_on(FakeBackend(replace(PLAN, token_bytes=0)), guide, monkeypatch, 64, 1)
    assert (unknown_speed.fits, unknown_speed.tokens_per_second) == (True, None)


@pytest.mark.parametrize(
    ("backend", "context", "rows", "reason", "runs"),
    [
        (FakeBackend(PLAN), 96, 4, "the KV cache for 4 sequences of 96 tokens does not fit", True),
        (FakeBackend(replace(PLAN, max_pages=1)), 96, 1, "the KV cache for a context of 96 tokens does not fit", True),
        (FakeBackend(PLAN), 129, 1, "the model has a context of 128 tokens, not 129", True),
        (FakeBackend(replace(PLAN, free=10)), 0, 1, "its weights do not fit in the free memory", True),
        (FakeBackend(PLAN, "no architecture"), 0, 1, "no architecture", False),
        (FakeBackend(ModelRefused("known later")), 0, 1, "known later", False),
        (FakeBackend(ModelTooLarge("too large")), 0, 1, "too large", True),
    ],
)
def test_model_that_does_not_fit_has_a_reason(
    backend: FakeBackend,
    context: int,
    rows: int,
    reason: str,
    runs: bool,
    guide: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = fit_on(backend, guide, monkeypatch, context, rows)
    assert (result.fits, result.runs, result.reason, result.tokens_per_second) == (False, runs, reason, None)


def test_machine_without_backends_is_an_error(guide: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(FakeBackend):
        def probe(self) -> Unavailable:  # type: ignore[override]
            return Unavailable("cpu", "no torch")

    with pytest.raises(backends.BackendUnavailable, match="cpu: no torch"):
        fit_on(Missing(PLAN), guide, monkeypatch, 0, 1)


def test_skeleton_fits_like_the_model(tmp_path: Path) -> None:
    from localllm.app.store.checks.skeleton import skeleton

    write_model(tmp_path / "tiny")
    hub = Hub(tmp_path / "tiny")
    expected = cpu.plan_memory(read_model(tmp_path / "tiny"), SMALL)
    with skeleton(hub.files, hub.fetch) as folder:
        actual = cpu.plan_memory(read_model(folder), SMALL)
    assert (actual.weights, actual.token_bytes, actual.page_bytes) == (
        expected.weights,
        expected.token_bytes,
        expected.page_bytes,
    )


def test_fit_of_a_file_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for path in (tmp_path, tmp_path / "notes.txt"):
        assert main(["fit", str(path)]) == 5
        assert "is not a model: it has no config.json and is no GGUF file" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert main(["fit", str(path)]) == 5
        assert "weights without config.json" in capsys.readouterr().err


def test_command_prints_the_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fits, "_speed", lambda *_: 12.5)
    assert main(["fit", "guide", "--backend", "cpu", "--context", "1000", "--parallel", "2", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)["fits"]
    assert (entry["backend"], entry["fits"], entry["context"], entry["parallel"]) == ("cpu", True, 1000, 2)
    sizes = sum(entry[name] for name in ("weights", "adapters", "max_cache", "remaining"))
    assert sizes == entry["free"]
    assert main(["fit", "guide", "--backend", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "remaining" in text
    assert "fits" in text
    assert "at most 2048 tokens" in text
    assert "about 12 tokens/s for one answer (estimated)" in text
    assert main(["fit", "guide", "--backend", "cpu", "--context", "4096"]) == 5
    assert "the model has a context of 2048 tokens, not 4096" in capsys.readouterr().out
    preferences.set_settings("guide", {"context": 300, "quant": "int8"})
    assert main(["fit", "guide", "--backend", "cpu", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)["fits"]
    assert entry["context"] == 300
    with opened("guide") as (path, origin):
        assert (path, origin.local) == (paths.guide_dir(), True)
