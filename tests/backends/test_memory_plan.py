"""The size of a runner: pages, captured sizes, and dtypes of the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from localllm.backends.cpu.device import DEVICE as CPU
from localllm.backends.pytorch.device import Device, Meter
from localllm.backends.pytorch.lora import slot_values
from localllm.backends.pytorch.memory_plan import cache_dtype, capturable_tokens, chosen_graphs, measure, plan
from localllm.engine.errors import ModelRefused, SettingRefused
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.runner import RunnerSpec, page_bytes
from localllm.kernels.ops import Ops

from . import canary
from .tape import Tape

PAGE = page_bytes(16, 1, 64, 1, 4)
WEIGHTS = 100 * PAGE
TAPED = replace(CPU, recorder=Tape, graphs="breakable")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return read_model(canary.save(tmp_path_factory.mktemp("canary")))


def planned(files: ModelFiles, budget: LoadOptions, pages: int, device: Device = CPU) -> RunnerSpec:
    """The spec for a device with memory for this number of pages."""
    return plan(files, replace(budget, adapter_slots=0), WEIGHTS + pages * PAGE, torch.float32, WEIGHTS, device)


def test_requested_cache_is_not_limited_by_rows(files: ModelFiles) -> None:
    spec = planned(files, LoadOptions(max_rows=1, cache_bytes=500 * PAGE), 1000)
    assert spec.groups[0].num_pages == 500
    assert spec.cache_bytes == 500 * PAGE
    assert spec.max_context == canary.CONTEXT


def test_automatic_cache_is_limited_by_its_rows(files: ModelFiles) -> None:
    device = replace(CPU, cache_share=0.5, row_tokens=40)
    assert planned(files, LoadOptions(max_rows=2), 20, device).groups[0].num_pages == 10, "the share"
    assert planned(files, LoadOptions(max_rows=2), 1000, device).groups[0].num_pages == 32, "one whole context"
    assert planned(files, LoadOptions(max_rows=20), 1000, device).groups[0].num_pages == 50, "40 tokens a row"
    assert planned(files, LoadOptions(max_rows=20, context=24), 1000, device).groups[0].num_pages == 30, (
        "no row has more"
    )
    whole = replace(device, row_tokens=None)
    assert planned(files, LoadOptions(max_rows=3), 1000, whole).groups[0].num_pages == 96


def test_one_context_may_take_more_than_the_share_of_the_cache(files: ModelFiles) -> None:
    device = replace(CPU, cache_share=0.5, context_share=0.9, row_tokens=None)
    options = LoadOptions(max_rows=4)
    assert planned(files, options, 20, device).groups[0].num_pages == 18, "less than one context"
    assert planned(files, options, 50, device).groups[0].num_pages == 32, "one whole context"
    assert planned(files, options, 100, device).groups[0].num_pages == 50, "the share"
    assert planned(files, replace(options, context=160), 20, device).groups[0].num_pages == 10


def test_context_may_be_the_maximum_of_model_and_memory(files: ModelFiles) -> None:
    budget = LoadOptions(context=canary.CONTEXT, cache_bytes=32 * PAGE)
    assert planned(files, budget, 0).max_context == canary.CONTEXT
    assert planned(files, replace(budget, context=1), 0).max_context == 1
    with pytest.raises(ModelRefused, match="the limit is"):
        planned(files, replace(budget, cache_bytes=32 * PAGE - 1), 0)


def test_errors_use_readable_units(files: ModelFiles) -> None:
    for free, size in ((2**30, "1.00 GiB"), (2**30 - 2**20, "1023.00 MiB")):
        with pytest.raises(ModelRefused, match=f"needs 2.00 GiB for its weights, but only {size} is free"):
            plan(files, LoadOptions(), free, torch.float32, 2**31, CPU)


def test_step_has_room_for_all_rows(files: ModelFiles) -> None:
    device = replace(CPU, step_tokens=32)
    assert planned(files, LoadOptions(max_rows=8), 2000, device).max_tokens == 32
    assert planned(files, LoadOptions(max_rows=48), 2000, device).max_tokens == 48
    assert planned(files, LoadOptions(max_rows=8, max_step_tokens=64), 2000, device).max_tokens == 64


def test_captured_sizes_follow_the_options(files: ModelFiles) -> None:
    def sizes(device: Device, graphs: Graphs = "auto") -> tuple[bool, bool]:
        spec = planned(files, LoadOptions(max_rows=4, graphs=graphs), 2000, device)
        return bool(spec.graph_rows), bool(spec.graph_tokens)

    assert sizes(CPU, graphs="full") == (False, False), "no recorder"
    assert sizes(TAPED) == (True, True)
    assert sizes(TAPED, graphs="split") == (True, True)
    assert sizes(TAPED, graphs="full") == (True, False)
    assert sizes(TAPED, graphs="off") == (False, False)
    assert sizes(replace(TAPED, captures_attention=False)) == (False, True)
    assert [chosen_graphs(LoadOptions(graphs="full"), device) for device in (CPU, TAPED)] == ["off", "full"]


def test_capturable_tokens_are_limited_by_layer_work(files: ModelFiles) -> None:
    assert capturable_tokens(files.config, 4000, CPU) == 0
    assert capturable_tokens(files.config, 4000, TAPED) == 2048
    assert capturable_tokens(files.config, 100, TAPED) == 100
    layer = 128 * (2 * (2 + 1) * 64 + 3 * files.config.intermediate_size)
    assert capturable_tokens(files.config, 4000, replace(TAPED, layer_work=100.5 * layer)) == 100


def test_fp8_cache_needs_a_device_that_supports_it(files: ModelFiles) -> None:
    able, fp8 = replace(CPU, fp8_cache=True), LoadOptions(cache_dtype="fp8")
    assert cache_dtype(files.config, LoadOptions(), torch.bfloat16, able) == torch.bfloat16
    assert cache_dtype(files.config, fp8, torch.bfloat16, able) == torch.float8_e4m3fn
    assert plan(files, replace(fp8, cache_bytes=8 * PAGE), 2**30, torch.bfloat16, 0, able).groups[0].num_pages == 32
    with pytest.raises(SettingRefused, match="not supported on cpu"):
        cache_dtype(files.config, fp8, torch.bfloat16, CPU)
    with pytest.raises(SettingRefused, match="needs dtype bfloat16"):
        cache_dtype(files.config, fp8, torch.float32, able)


def test_int8_cache_has_a_scale_for_each_head_of_a_token(files: ModelFiles) -> None:
    able, int8 = replace(CPU, int8_cache=True), LoadOptions(cache_dtype="int8")
    assert cache_dtype(files.config, int8, torch.bfloat16, able) == torch.int8
    dim = files.config.cache_shape[2]
    plain, scaled = (
        measure(files, options, 2**30, torch.bfloat16, 0, able).page_bytes for options in (LoadOptions(), int8)
    )
    assert scaled / plain == (dim + 4) / (2 * dim)
    for device, dtype, problem in (
        (CPU, torch.bfloat16, "int8 is not supported on cpu"),
        (replace(CPU, fp8_cache=True), torch.bfloat16, "int8 is not supported on cpu"),
        (able, torch.float32, "int8 needs dtype bfloat16"),
    ):
        with pytest.raises(SettingRefused, match=problem):
            cache_dtype(files.config, int8, dtype, device)


def test_workspace_has_the_converted_int8_pages_of_one_context(files: ModelFiles) -> None:
    _, heads, dim = files.config.cache_shape
    meter = Meter(lambda: 0, lambda: None, 0, 0)
    able = replace(CPU, int8_cache=True, int8_copy=9, meter=meter)

    def workspace(**options: Any) -> int:
        return measure(files, LoadOptions(**options), 2**30, torch.bfloat16, 0, able).workspace

    assert workspace(cache_dtype="int8", context=100) - workspace(context=100) == 100 * heads * dim * 9
    assert workspace(cache_dtype="int8") - workspace() == files.config.max_positions * heads * dim * 9


def test_spec_reports_dtype_format_and_bytes(files: ModelFiles) -> None:
    device = replace(CPU, overlap=True, warnings=("slow",), step_seconds=7.0)
    spec = planned(files, LoadOptions(max_rows=4, quant="int8"), 2000, device)
    assert (spec.dtype, spec.quant, spec.weight_bytes) == ("float32", "int8", WEIGHTS)
    assert (spec.overlap, spec.warnings, spec.step_seconds) == (True, ("slow",), 7.0)
    assert planned(files, LoadOptions(max_rows=4), 2000).quant == ""


def test_device_defaults_claim_no_features(files: ModelFiles) -> None:
    """A device with default fields is correct, as docs/develop/add-a-backend.md says."""
    device = Device("cpu", "cpu", torch.cpu, Ops(), torch.float32)
    spec = planned(files, LoadOptions(max_rows=1, graphs="full"), 40, device)
    assert (spec.overlap, spec.step_seconds) == (False, 0.0)
    assert spec.warnings == ("the memory has room for a context of 160 tokens; the model supports 512",)
    assert (spec.graph_rows, spec.graph_tokens) == ((), ())
    assert spec.max_tokens == 512
    assert spec.groups[0].num_pages == 10, "a quarter of what is free"
    assert (device.pinned, device.fp8_cache, device.attentions, device.recorder) == (False, False, {}, None)
    assert (device.captures_attention, device.graphs, device.row_tokens) == (True, "full", 512)


def test_fetch_returns_a_copy() -> None:
    there = torch.ones(3)
    here = CPU.fetch(there)
    there.zero_()
    assert here.tolist() == [1.0] * 3


def test_adapter_slots_use_only_what_the_model_and_its_cache_leave(files: ModelFiles) -> None:
    """A model takes the same cache with and without adapter slots. There are fewer slots if the memory is tight."""
    options = LoadOptions(max_rows=1, cache_bytes=10 * PAGE, adapter_slots=3, adapter_rank=4)
    slot = slot_values(files.config, 4) * torch.float32.itemsize
    num_adapters = []
    for left in (-PAGE, 0, 2 * slot - 1, 2 * slot, 3 * slot, 100 * slot):
        free = WEIGHTS + 10 * PAGE + left
        spec = plan(files, options, free, torch.float32, WEIGHTS, CPU)
        without = plan(files, replace(options, adapter_slots=0), free, torch.float32, WEIGHTS, CPU)
        assert replace(spec, num_adapters=0, adapters_per_step=0, slots_hint=without.slots_hint) == without
        assert spec.adapters_per_step == spec.num_adapters
        num_adapters.append(spec.num_adapters)
    assert num_adapters == [0, 0, 0, 1, 2, 3]


def test_the_hint_says_why_there_are_no_adapter_slots(files: ModelFiles) -> None:
    options = LoadOptions(max_rows=1, cache_bytes=100 * PAGE, adapter_rank=64)
    full = plan(files, options, WEIGHTS + 100 * PAGE, torch.float32, WEIGHTS, CPU)
    assert full.num_adapters == 0
    slot = slot_values(files.config, 64) * torch.float32.itemsize
    assert f"less than the {-(-2 * slot // 2**20)} MiB that adapters need" in full.slots_hint
    off = plan(files, replace(options, adapter_slots=0), WEIGHTS + 100 * PAGE, torch.float32, WEIGHTS, CPU)
    assert off.slots_hint == "raise the setting adapter_slots"
