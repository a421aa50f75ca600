"""The defaults of records: greedy draws, the base model, no abilities, counters at zero."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from localllm.engine.batch import Want
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling, Sequence
from localllm.engine.runner import CacheGroup, DeviceInfo, RunnerSpec, StepResult
from localllm.engine.stats import Stats


def test_counters_begin_at_zero() -> None:
    assert set(astuple(Stats())) == {0}


def test_a_request_is_greedy_and_of_the_base_model() -> None:
    neutral = Sampling()
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (0.0, 0, 1.0, 0.0)
    assert (neutral.repetition_penalty, neutral.presence_penalty, neutral.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (neutral.logit_bias, neutral.seed, neutral.logprobs, neutral.reads_history) == ((), 0, None, False)
    request = Request("a", (1, 2), 3)
    assert (request.sampling, request.stop_ids, request.grammar) == (neutral, frozenset(), None)
    assert (request.adapter, request.adapter_scale, request.namespace) == (None, 1.0, None)
    new = Sequence(request)
    assert (new.tokens, new.limit) == ([1, 2], 5)
    assert (new.computed, new.unknown, new.drafting, new.last_row) == (0, 0, False, -1)
    assert (new.adapter_slot, new.lease, new.history, new.finish) == (0, None, None, None)
    assert (new.preemptions, new.cached) == (0, 0)


def test_a_runner_has_no_ability_that_it_does_not_claim() -> None:
    spec = RunnerSpec(vocab_size=9, max_tokens=8, max_rows=4, max_context=32)
    assert (spec.groups, spec.graph_rows, spec.graph_tokens, spec.warnings) == ((), (), (), ())
    assert (spec.num_states, spec.num_snapshots, spec.snapshot_interval, spec.max_drafts) == (0, 0, 0, 0)
    assert (spec.num_adapters, spec.adapters_per_step, spec.overlap) == (0, 0, False)
    assert (spec.dtype, spec.quant, spec.step_seconds) == ("", "", 0.0)
    assert (spec.weight_bytes, spec.token_bytes, spec.cache_bytes) == (0, 0, 0)
    assert CacheGroup(page_size=4, num_pages=3).window == 0
    answers = StepResult(np.zeros(1, np.int32), np.array([0, 1], np.int32))
    assert (answers.logprobs, answers.top_tokens, answers.top_logprobs, answers.hidden) == (None,) * 4
    assert answers.late_compiles == 0
    device = DeviceInfo("toy", "a toy", 2, 1)
    assert (device.features, device.main_memory, device.second_choice) == ({}, False, False)


def test_a_runner_s_room_is_that_of_its_smallest_group_without_a_window() -> None:
    groups = CacheGroup(4, 10), CacheGroup(8, 3), CacheGroup(4, 2, window=4)
    spec = RunnerSpec(vocab_size=9, max_tokens=8, max_rows=4, max_context=32, groups=groups)
    assert [group.tokens for group in groups] == [40, 24, 8]
    assert (spec.cache_tokens, spec.max_length) == (24, 24)
    states = RunnerSpec(vocab_size=9, max_tokens=8, max_rows=4, max_context=32, num_states=3)
    assert (states.cache_tokens, states.max_length) == (96, 32)
    assert RunnerSpec(vocab_size=9, max_tokens=8, max_rows=4, max_context=32, groups=groups[2:]).cache_tokens == 128


def test_a_model_is_loaded_as_it_is_and_sized_by_itself() -> None:
    options = LoadOptions()
    assert (options.context, options.cache_bytes, options.max_step_tokens) == (None, None, None)
    assert (options.max_rows, options.page_size, options.threads) == (64, None, None)
    assert (options.dtype, options.cache_dtype, options.graphs, options.attention) == ("auto",) * 4
    assert (options.quant, options.compiler, options.ops) == ("none", "inductor", ())
    assert (options.packed_dir, options.compiled_dir, options.self_test_dir) == (None, None, None)


def test_want_fits_uint8_arrays() -> None:
    assert [Want.NOTHING, Want.TOKEN, Want.HIDDEN] == [0, 1, 2]
