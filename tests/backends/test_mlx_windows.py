"""MLX: models whose layers with a window have pages of their own, and drop what the window has passed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx

from localllm.backends import mlx
from localllm.backends.mlx import opening, plan
from localllm.backends.mlx.cache import LayerShape
from localllm.engine.files.model_config import parse_config
from localllm.engine.files.model_files import read_model
from localllm.engine.kv import KVCache
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner, page_bytes

from . import canary
from .batches import Solo
from .conformance import BUDGET, PAGE, Conformance, Conversation, Planned
from .mlx_models import SAME_BITS, patched
from .test_windows import CONTEXT, GEMMA3_27B, GPT_OSS_20B, needed_bytes
from .traffic import Traffic

pytestmark = pytest.mark.real_otherdevice
slow = pytest.mark.slow

WIDE = replace(BUDGET, max_step_tokens=64, cache_bytes=4 * 160 * page_bytes(PAGE, 1, 64, 1, 4))


def opened(folder: Path, options: LoadOptions, window: int = canary.BACK + 1) -> Runner:
    return mlx.open(read_model(canary.save_windowed(folder, window)), replace(options, dtype="float32"))


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups drop what windows have passed after a few tokens."""
    monkeypatch.setattr(plan, "STEP", 8)


@slow
@pytest.mark.real_otherdevice
class TestMlxWindows(Conformance):
    backend = "mlx"
    same_bits = SAME_BITS

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
        for _ in patched(plan, "STEP", 8):
            yield opened(tmp_path_factory.mktemp("canary"), WIDE)

    def test_window_has_a_group(self, runner: Runner) -> None:
        full, window = runner.spec.groups
        assert (full.window, window.window) == (0, canary.BACK + 1)
        assert window.num_pages < full.num_pages

    def test_window_needs_no_memory_for_what_it_has_passed(self, planned: Planned) -> None:  # type: ignore[override]
        full, window = planned.spec.groups
        groups = full, replace(window, num_pages=21)
        planned.spec = replace(planned.spec, max_tokens=32, groups=groups)
        super().test_window_needs_no_memory_for_what_it_has_passed(planned)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=slow), True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize(
    ("room", "count"), [(1, 30), *(pytest.param(room, 500, marks=slow) for room in (0.5, 1, 1000))]
)
def test_requests_come_and_go(
    tmp_path: Path, overlap: bool, room: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wrong token, no lost page, and no growth of the memory."""
    monkeypatch.setattr(opening, "ROOM", room)
    options = replace(WIDE, max_rows=6, max_step_tokens=32, context=128, cache_bytes=WIDE.cache_bytes // 4)
    runner: Any = opened(tmp_path, options)
    assert len(runner.spec.groups) == 2
    runner._release()
    before = mx.get_active_memory()
    Traffic(count, canary.adapter(tmp_path / "adapter"), seed=5 + overlap).check(runner, overlap=overlap)
    runner._release()
    assert not runner._caches.groups
    assert not runner._planner._owners
    adapter_bytes = 2**19
    assert mx.get_active_memory() < before + adapter_bytes
    runner.close()


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("length", [24, 25, 26, 100])
def test_hits_are_exact_at_the_window(tmp_path: Path, length: int, chunk: int) -> None:
    """Prefixes of W - 1, W, W + 1 and 4 W positions are hits where the cache has the window before them."""
    options = replace(WIDE, max_rows=6, max_step_tokens=32, context=128)
    planned = Planned(opened(tmp_path, options, window=25), overlap=True)
    planned.spec = replace(planned.spec, max_tokens=chunk)
    talk = Conversation(planned)
    first, second = canary.prompt(1, 110, seed=1), canary.prompt(0, 60, seed=2)
    prompts = {"first": first[:length], "longer": first, "other": [*first[:length], *second[1 : 125 - length - 8]]}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 8)
        assert talk.finish()[name] == canary.walk(prompt, 8)
    assert talk.cached["longer"] >= (length - 1) // PAGE * PAGE, "the first request ended here"


def test_layers_with_a_window_keep_little_memory(tmp_path: Path, short_steps: None) -> None:
    """A long row has all columns in the first layer, and those of its window in the second."""
    runner: Any = opened(tmp_path, replace(WIDE, context=512))
    prompt = canary.prompt(1, 200, seed=1)
    solo = Solo(runner, range(1, 60))
    solo.feed(prompt, chunk=50)
    [group] = runner._caches.groups.values()
    full, window = (layer.size() for layer in group.layers)
    assert full == 200
    assert canary.BACK < window <= plan.kept_columns(canary.BACK + 1) + 50


def test_plan_before_the_load_equals_the_load(tmp_path: Path) -> None:
    files = read_model(canary.save_windowed(tmp_path, context=4096))
    options = LoadOptions(max_rows=2, dtype="float32", max_step_tokens=256)
    runner = mlx.open(files, options)
    planned = mlx.plan_memory(files, options)
    assert len(runner.spec.groups) == 2
    assert runner.spec.cache_bytes == planned.planned_cache < planned.planned_cache + planned.window_savings(4096)
    runner.close()


def shapes_of(config: Any) -> list[LayerShape]:
    size = config.num_kv_heads, config.head_dim, config.head_dim, mx.bfloat16
    return [LayerShape(*size, config.window if kind == "sliding" else 0) for kind in config.layer_kinds]


@pytest.mark.parametrize("published", [GEMMA3_27B, GPT_OSS_20B], ids=["gemma3-27b", "gpt-oss-20b"])
@pytest.mark.parametrize("rows", [1, 64])
def test_cache_of_a_long_context_is_little_more_than_the_windows_need(published: dict[str, Any], rows: int) -> None:
    """128k positions fit in 1.15 times the keys and values that the layers read: once in pages, once in groups."""
    config = parse_config(published)
    files: Any = SimpleNamespace(config=config, name="model", warnings=())
    needed = 2 * needed_bytes(config)
    loaded: Any = SimpleNamespace(shapes=shapes_of(config), quant="", bytes=0, token_bytes=0)
    options = LoadOptions(context=CONTEXT, max_rows=rows, cache_bytes=int(1.15 * needed))
    spec = opening._plan(files, options, loaded, 2**38, 1)
    assert spec.max_context == CONTEXT
    assert needed < spec.cache_bytes <= 1.15 * needed
    KVCache(spec)  # checks that the window's pages suffice for one sequence
