"""The conformance suite that every backend must pass. A backend's tests subclass Conformance.

The canary model's tokens are known, so everything is compared as integers, whatever the backend computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from localllm import backends
from localllm.engine.batch import Batch, Want
from localllm.engine.drafts import Drafter
from localllm.engine.engine import Engine
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import CacheGroup, Pending, Runner, RunnerSpec, Unavailable, page_bytes

from . import canary
from .batches import Row, make_batch

PAGE = 8
LENGTH = 24
BUDGET = LoadOptions(
    context=256, cache_bytes=120 * page_bytes(PAGE, 1, 64, 1, 4), max_rows=12, page_size=PAGE, threads=1
)
HOT = Sampling(temperature=6.0)  # the canary's margin is about 11: this draws anything


class Planned:
    """A wrapper of a runner that sets whether steps overlap."""

    def __init__(self, runner: Runner, *, overlap: bool) -> None:
        self._runner, self.spec = runner, replace(runner.spec, overlap=overlap)

    def run(self, batch: Batch) -> Pending:
        return self._runner.run(batch)

    def prepare_adapter(self, adapter: Adapter) -> None:
        self._runner.prepare_adapter(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._runner.load_adapter(slot, adapter)

    def forget_adapter(self, adapter: Adapter) -> None:
        self._runner.forget_adapter(adapter)

    def close(self) -> None:
        """Does nothing, because all tests of the suite share one runner."""


def batch_of(runner: Runner, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> Batch:
    """A step of the canary model. All cache groups get the same pages."""
    return make_batch(rows, canary.VOCAB, copies, max(1, len(runner.spec.groups)))


class Conversation:
    """An engine with requests. The test calls each step."""

    def __init__(self, runner: Runner, drafter: Drafter | None = None) -> None:
        self.engine = Engine(runner, drafter=drafter)
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.finishes: dict[str, str] = {}

    def submit(
        self, name: str, prompt: Sequence[int], count: int, sampling: Sampling | None = None, **more: Any
    ) -> None:
        self.tokens[name] = []
        self.engine.submit(Request(name, tuple(prompt), count, sampling or Sampling(), **more))

    def step(self) -> None:
        for delta in self.engine.step():
            self.tokens[delta.request_id] += delta.tokens
            self.cached[delta.request_id] = delta.cached
            if delta.finish:
                self.finishes[delta.request_id] = delta.finish

    def finish(self) -> dict[str, list[int]]:
        while self.engine.has_work:
            self.step()
        return self.tokens


def crowd(rows: int) -> LoadOptions:
    """Room for so many rows of `check_crowd`, but not for all that they come to hold."""
    return replace(BUDGET, max_rows=rows, max_step_tokens=512, cache_bytes=6 * rows * page_bytes(PAGE, 1, 64, 1, 4))


def check_crowd(runner: Runner, rows: int) -> None:
    """Requests that begin alike come and go until so many have run side by side, and some were preempted: each gives
    the known tokens."""
    rng = np.random.default_rng(rows)
    talk = Conversation(runner)
    bases = [canary.prompt(key, 70, seed=key) for key in range(canary.KEYS)]
    prompts: dict[str, list[int]] = {}
    most = 0
    while len(prompts) < 2 * rows or talk.engine.has_work:
        for _ in range(rows // 8 if len(prompts) < 2 * rows else 0):
            name, base = f"r{len(prompts)}", bases[int(rng.integers(canary.KEYS))]
            tail = rng.integers(0, canary.SYMBOLS, int(rng.integers(1, 12))).tolist()
            prompts[name] = [*base[: int(rng.integers(22, 60))], *tail]
            talk.submit(name, prompts[name], int(rng.integers(1, 110)))
        if rng.random() < 0.2:
            talk.engine.cancel(str(rng.choice(list(prompts))))
        talk.step()
        most = max(most, talk.engine.stats().running)
    for name, prompt in prompts.items():
        assert talk.tokens[name] == canary.walk(prompt, len(talk.tokens[name])), name
    stats = talk.engine.stats()
    assert most == rows
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert sum(reason == "length" for reason in talk.finishes.values()) > rows // 2


@dataclass
class Script:
    """A drafter that proposes the tokens of one text. Every `wrong`-th token of the text is proposed wrong; 0: none."""

    text: list[int]
    wrong: int = 0

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        if tokens != self.text[: len(tokens)]:
            return []
        places = range(len(tokens), min(len(tokens) + limit, len(self.text)))
        return [self._other(self.text[at]) if self.wrong and at % self.wrong == 0 else self.text[at] for at in places]

    def _other(self, token: int) -> int:
        return (token + 1) % canary.SYMBOLS


class Offers:
    """The tests of the features in a RunnerSpec: drafts, windows, snapshots of states. `walk` has the known tokens."""

    @staticmethod
    def walk(prompt: Sequence[int], count: int) -> list[int]:
        return canary.walk(prompt, count)

    @pytest.fixture(params=[False, True], ids=["in-turn", "overlapped"])
    def planned(self, runner: Runner, request: pytest.FixtureRequest) -> Runner:
        return Planned(runner, overlap=request.param)

    @pytest.mark.parametrize("wrong", [0, 1, 4])
    def test_drafts_are_verified(self, planned: Runner, wrong: int) -> None:
        """Right drafts save steps, wrong drafts change nothing."""
        most = planned.spec.max_drafts
        if not most:
            pytest.skip("this runner verifies no drafts")
        prompt = canary.prompt(1, LENGTH, seed=2)
        expected = self.walk(prompt, 60)
        talk = Conversation(planned, Script([*prompt, *expected], wrong))
        talk.submit("a", prompt, 60)
        assert talk.finish() == {"a": expected}
        if not wrong:
            assert talk.engine.stats().steps <= 60 / (1 + most) + 4

    def test_window_needs_no_memory_for_what_it_has_passed(self, planned: Runner) -> None:
        """The pages of a group with a window are fewer than the request's positions, so passed pages are used again."""
        windows = [group for group in planned.spec.groups if group.window]
        if not windows:
            pytest.skip("this runner has no cache group with a window")
        prompt = canary.prompt(2, 60, seed=3)
        count = planned.spec.max_length - 60
        assert all(group.tokens < planned.spec.max_length for group in windows), "this budget proves nothing"
        expected = self.walk(prompt, count)
        for name in ("cold", "again"):
            talk = Conversation(planned)
            talk.submit(name, prompt, count)
            assert talk.finish() == {name: expected}

    def test_prefix_hit_restores_the_state(self, planned: Runner) -> None:
        if not planned.spec.num_snapshots:
            pytest.skip("this runner saves no states")
        prompt = canary.prompt(3, 60, seed=4)
        other = [*prompt[:50], *canary.prompt(0, 25, seed=5)[1:]]
        talk = Conversation(planned)
        for name, tokens in (("cold", prompt), ("again", prompt), ("branch", other)):
            talk.submit(name, tokens, 30)
            assert talk.finish()[name] == self.walk(tokens, 30)
        assert talk.cached["cold"] == 0
        assert talk.cached["again"] > 0
        assert talk.cached["branch"] > 0


@pytest.mark.real
class Conformance(Offers):
    """Subclass with `backend` set, and with `page` if pages do not have PAGE tokens; `same_bits` is False where
    a row's logits may differ in their last bits with the number of rows beside it."""

    backend: str
    same_bits = True
    page = PAGE
    save_adapter = staticmethod(canary.save_adapter)

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        module = backends.load(cls.backend)
        actual = module.probe()
        if isinstance(actual, Unavailable):
            pytest.skip(f"{cls.backend}: {actual.reason}")
        return module.open(read_model(canary.save(tmp_path_factory.mktemp("canary"))), BUDGET)

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
        """Adapters of the canary model with the shifts 1, 2, 3, 4."""
        if not runner.spec.num_adapters:
            pytest.skip(f"{cls.backend} loads no adapters")
        root = tmp_path_factory.mktemp("adapters")
        folders = [cls.save_adapter(root / str(shift), shift) for shift in range(1, canary.KEYS)]
        return [Adapter(folder.name, str(folder), read_adapter(folder).version) for folder in folders]

    @pytest.fixture
    def spec(self, runner: Runner) -> RunnerSpec:
        if not runner.spec.groups:
            pytest.skip("this backend's cache has no pages")
        return runner.spec

    def test_one_request(self, planned: Runner) -> None:
        talk, prompt = Conversation(planned), canary.prompt(1, LENGTH, seed=1)
        talk.submit("a", prompt, 150)
        assert talk.finish() == {"a": self.walk(prompt, 150)}
        assert talk.finishes == {"a": "length"}

    @pytest.mark.parametrize("longest", [1, 5, PAGE - 1, PAGE, PAGE + 1])
    def test_prompt_in_chunks(self, planned: Runner, longest: int) -> None:
        planned.spec = replace(planned.spec, max_tokens=longest)
        talk, prompt = Conversation(planned), canary.prompt(2, 70, seed=2)
        talk.submit("a", prompt, 30)
        assert talk.finish() == {"a": self.walk(prompt, 30)}

    def test_prefix_hit_equals_cold_run(self, planned: Runner) -> None:
        talk = Conversation(planned)
        common = self.page + 33
        hit = common // self.page * self.page
        prompt = canary.prompt(3, common + 9, seed=3)
        other = [*prompt[:common], *canary.prompt(0, 25, seed=4)[1:]]
        talk.submit("cold", prompt, 40)
        talk.finish()
        talk.submit("again", prompt, 40)
        talk.submit("branch", other, 40)
        talk.finish()
        assert talk.tokens["cold"] == talk.tokens["again"] == self.walk(prompt, 40)
        assert talk.tokens["branch"] == self.walk(other, 40)
        assert talk.cached["cold"] == 0
        assert talk.cached["again"] >= hit
        assert talk.cached["branch"] >= hit

    def test_identical_prompts_in_one_batch(self, planned: Runner) -> None:
        talk, prompt = Conversation(planned), canary.prompt(4, 45, seed=5)
        for name in "abcd":
            talk.submit(name, prompt, 60)
        expected = self.walk(prompt, 60)
        assert talk.finish() == dict.fromkeys("abcd", expected)

    @pytest.mark.parametrize("seed", range(4))
    def test_joins_and_leaves_equal_solo_runs(self, planned: Runner, seed: int) -> None:
        rng = np.random.default_rng(seed)
        talk = Conversation(planned)
        prompts: dict[str, list[int]] = {}
        waiting = [f"r{number}" for number in range(16)]
        while waiting or talk.engine.has_work:
            if waiting and rng.random() < 0.3:
                name = waiting.pop()
                prompts[name] = canary.prompt(int(rng.integers(canary.KEYS)), int(rng.integers(21, 60)), seed=seed)
                talk.submit(name, prompts[name], int(rng.integers(1, 80)))
            if rng.random() < 0.03 and talk.engine.has_work:
                talk.engine.cancel(str(rng.choice(list(prompts))))
            talk.step()
        for name, prompt in prompts.items():
            assert talk.tokens[name] == self.walk(prompt, len(talk.tokens[name])), name
        assert set(talk.finishes) == set(prompts)
        assert sum(reason == "length" for reason in talk.finishes.values()) > 8

    def test_preempted_requests_equal_solo_runs(self, planned: Runner) -> None:
        """Memory for three of the eight: the young give way and are computed again."""
        length = max(30, self.page - 28)  # the answers need another page
        if planned.spec.groups:
            pages = 3 * -(-(length + 90) // self.page)
            groups = [CacheGroup(self.page, pages, group.window) for group in planned.spec.groups]
            planned.spec = replace(planned.spec, groups=tuple(groups))
        talk = Conversation(planned)
        prompts = {f"r{number}": canary.prompt(number % canary.KEYS, length, seed=number) for number in range(8)}
        for name, prompt in prompts.items():
            talk.submit(name, prompt, 90)
        assert talk.finish() == {name: self.walk(prompt, 90) for name, prompt in prompts.items()}
        if planned.spec.groups:
            assert talk.engine.stats().preemptions > 0

    def test_draws_do_not_depend_on_batch_mates(self, planned: Runner) -> None:
        prompts = {f"r{seed}": canary.prompt(seed % canary.KEYS, LENGTH + seed, seed) for seed in range(6)}
        # The last bit decides who is at the edge of a nucleus.
        hot = replace(HOT, top_p=0.95 if self.same_bits else 1.0, repetition_penalty=1.1)
        solo = {}
        for seed, (name, prompt) in enumerate(prompts.items()):
            talk = Conversation(planned)
            talk.submit(name, prompt, 40, replace(hot, seed=seed))
            solo |= talk.finish()
        talk = Conversation(planned)
        for seed, (name, prompt) in reversed(list(enumerate(prompts.items()))):
            talk.submit(name, prompt, 40, replace(hot, seed=seed))
            talk.step()
        assert talk.finish() == solo
        assert solo["r0"] != self.walk(prompts["r0"], 40), "this temperature should not be greedy"

    def test_logprobs_come_from_the_raw_logits(self, planned: Runner) -> None:
        talk, prompt = Conversation(planned), canary.prompt(1, LENGTH, seed=1)
        actual = []
        biased = replace(HOT, logprobs=3, logit_bias=((7, 100.0),))
        talk.engine.submit(Request("a", tuple(prompt), 3, biased))
        talk.engine.submit(Request("b", tuple(canary.prompt(2, LENGTH, seed=9)), 3))
        while talk.engine.has_work:
            actual += [delta for delta in talk.engine.step() if delta.request_id == "a"]
        expected = self.walk(prompt, 1)[0]
        first = actual[0].logprobs[0]
        assert first.token == 7, "the bias wins"
        assert first.top[0][0] == expected, "but is not in the log-probabilities"
        assert first.top[0][1] > -0.01
        assert first.logprob < -5

    def test_permuted_pages_change_nothing(self, runner: Runner, spec: RunnerSpec) -> None:
        prompt = canary.prompt(2, 60, seed=8)
        for seed in range(5):
            pages = (np.random.default_rng(seed).permutation(min(group.num_pages for group in spec.groups)) + 1)[
                :8
            ].tolist()
            result = runner.run(batch_of(runner, [Row(prompt, 0, pages)])).result()
            token = int(result.tokens[0])
            assert token == self.walk(prompt, 1)[0]
            result = runner.run(batch_of(runner, [Row([token], 60, pages)])).result()
            assert int(result.tokens[0]) == self.walk(prompt, 2)[1]

    def test_rows_in_any_order(self, runner: Runner, spec: RunnerSpec) -> None:
        prompts = [canary.prompt(key, 25 + 7 * key, seed=key) for key in range(canary.KEYS)]
        rows = [Row(prompt, 0, range(1 + 8 * at, 9 + 8 * at)) for at, prompt in enumerate(prompts)]
        expected = [self.walk(prompt, 1)[0] for prompt in prompts]
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
            result = runner.run(batch_of(runner, [rows[at] for at in order])).result()
            assert result.tokens.tolist() == [expected[at] for at in order]

    def test_padded_rows_change_nothing(self, runner: Runner, spec: RunnerSpec) -> None:
        """A padded row has one token at position 0 in page 0, and returns nothing."""
        if spec.max_paths:
            pytest.skip("this runner has sequences, and no graphs with padded rows")
        padding = Row([0], 0, [0], Want.NOTHING)
        prompt = canary.prompt(4, 30, seed=7)
        rows = [padding, Row(prompt, 0, range(1, 7)), padding, padding]
        token, following = self.walk(prompt, 2)
        result = runner.run(batch_of(runner, rows)).result()
        assert (result.tokens.tolist(), result.row_starts.tolist()) == ([token], [0, 0, 1, 1, 1])
        decode = [Row([token], 30, range(1, 7)), padding, padding]
        assert runner.run(batch_of(runner, decode)).result().tokens.tolist() == [following]

    def test_carried_tokens_equal_tokens_from_the_host(self, runner: Runner, spec: RunnerSpec) -> None:
        """A carried token comes from the right row, even if the rows change. The host does not know the token yet."""
        prompts = [canary.prompt(key, 25, seed=key) for key in (1, 2, 3)]
        pages = [range(1 + 8 * at, 9 + 8 * at) for at in range(3)]
        first = [Row(prompt, 0, own) for prompt, own in zip(prompts, pages, strict=True)]
        steps = [runner.run(batch_of(runner, first))]
        steps.append(
            runner.run(
                batch_of(
                    runner,
                    [
                        Row([0], 25, pages[2], carry=2),
                        Row(canary.prompt(0, 30, seed=6), 0, range(40, 48), Want.NOTHING),
                        Row([0], 25, pages[0], carry=0),
                    ],
                )
            )
        )
        second_known = self.walk(prompts[1], 1)
        results = [steps[0].result().tokens.tolist()]  # at most two steps are in flight, as in the engine
        steps.append(
            runner.run(
                batch_of(
                    runner,
                    [
                        Row(second_known, 25, pages[1]),
                        Row([0], 26, pages[0], carry=2),
                        Row([0], 26, pages[2], carry=0),
                    ],
                )
            )
        )
        results += [step.result().tokens.tolist() for step in steps[1:]]
        walks = [self.walk(prompt, 3) for prompt in prompts]
        assert results[0] == [walk[0] for walk in walks]
        assert tuple(results[1]) == (walks[2][1], walks[0][1])
        assert results[2] == [walks[1][1], walks[0][2], walks[2][2]]

    def test_copies_are_read_before_any_is_written(self, runner: Runner, spec: RunnerSpec) -> None:
        one, two = canary.prompt(1, 40, seed=1), canary.prompt(2, 40, seed=2)
        runner.run(batch_of(runner, [Row(one, 0, range(1, 7)), Row(two, 0, range(7, 13))])).result()
        swap = [(page, page + 6) for page in range(1, 6)] + [(page + 6, page) for page in range(1, 6)]
        rows = [
            Row(self.walk(one, 1), 40, [*range(7, 12), 20]),
            Row(self.walk(two, 1), 40, [*range(1, 6), 21]),
        ]
        result = runner.run(batch_of(runner, rows, swap)).result()
        assert result.tokens.tolist() == [self.walk(one, 2)[1], self.walk(two, 2)[1]]

    def test_hidden_states_on_demand(self, runner: Runner, spec: RunnerSpec) -> None:
        prompt = canary.prompt(1, 30, seed=1)
        rows = [
            Row(prompt, 0, range(1, 6), Want.HIDDEN),
            Row(prompt, 0, range(7, 12)),
            Row(prompt[:9], 0, range(13, 18), Want.NOTHING),
        ]
        result = runner.run(batch_of(runner, rows)).result()
        assert result.tokens[1] == self.walk(prompt, 1)[0]
        assert result.hidden is not None
        assert result.hidden.shape[0] == 2
        assert result.hidden.dtype == np.float32
        assert np.abs(result.hidden[0]).max() > 0
        last = [Row(prompt[-1:], 29, range(1, 6), Want.HIDDEN), Row(prompt[-1:], 29, range(7, 12))]
        for rows in (last, last[:1]):
            alone = runner.run(batch_of(runner, rows)).result()
            assert alone.hidden is not None, "a step of one token a row answers with hidden states as well"
            np.testing.assert_allclose(alone.hidden[0], result.hidden[0], atol=1e-3)

    def test_answers_belong_to_their_rows(self, runner: Runner, spec: RunnerSpec) -> None:
        """Rows that return nothing do not move the results of the rows beside them."""
        prompts = [canary.prompt(key, 25 + 4 * key, seed=key) for key in range(4)]
        asked = replace(HOT, logprobs=2, seed=3)
        quiet, *rows = [Row(prompt, 0, range(1 + 6 * at, 7 + 6 * at)) for at, prompt in enumerate(prompts)]
        rows[0].want, rows[1].sampling, quiet.want = Want.HIDDEN, asked, Want.NOTHING
        expected = runner.run(batch_of(runner, rows)).result()
        actual = runner.run(batch_of(runner, [quiet, rows[0], quiet, *rows[1:]])).result()
        assert actual.tokens[1:].tolist() == expected.tokens[1:].tolist()
        assert actual.row_starts.tolist() == [0, 0, 1, 1, 2, 3]
        for name, answer in [("hidden", 0), ("logprobs", 1), ("top_tokens", 1), ("top_logprobs", 1)]:
            values, others = getattr(actual, name), getattr(expected, name)
            np.testing.assert_allclose(values[answer], others[answer], atol=1e-3)

    def test_adapters_in_one_batch(self, planned: Runner, adapters: Sequence[Adapter]) -> None:
        """Equal prompts under the base model and two adapters, more than once: each as if it ran alone."""
        talk = Conversation(planned)
        for adapter in adapters[:2]:
            talk.engine.register_adapter(adapter)
        expected: dict[str, list[int]] = {}
        for key in range(canary.KEYS):
            prompt = canary.prompt(key, LENGTH + key, seed=1)
            for shift, adapter in enumerate((None, *adapters[:2])):
                name = f"{key}-{shift}"
                talk.submit(name, prompt, 30, adapter=adapter)
                expected[name] = self.walk(canary.under(prompt, shift), 30)
            talk.step()
        assert talk.finish() == expected

    def test_reloaded_adapter_reuses_no_slot_and_no_cache(self, planned: Runner, adapters: Sequence[Adapter]) -> None:
        """Neither slot nor cache of the version before."""
        talk = Conversation(planned)
        prompt = canary.prompt(2, self.page + 16, seed=4)
        for shift in (1, 3, 1):
            adapter = replace(adapters[shift - 1], name="reloaded")
            talk.engine.register_adapter(adapter)
            name = f"{shift}-{len(talk.tokens)}"
            talk.submit(name, prompt, 30, adapter=adapter)
            assert talk.finish()[name] == self.walk(canary.under(prompt, shift), 30)
            assert (talk.cached[name] > 0) == (name == "1-2")

    def test_scale_is_part_of_the_namespace(self, planned: Runner, adapters: Sequence[Adapter]) -> None:
        talk = Conversation(planned)
        talk.engine.register_adapter(adapters[0])
        prompt = canary.prompt(3, LENGTH, seed=5)
        for name, scale, shift in (("one", 1.0, 1), ("none", 0.0, 0), ("again", 1.0, 1)):
            talk.submit(name, prompt, 30, adapter=adapters[0], adapter_scale=scale)
            assert talk.finish()[name] == self.walk(canary.under(prompt, shift), 30)

    def test_more_adapters_than_slots(self, planned: Runner, adapters: Sequence[Adapter]) -> None:
        """Requests wait for a slot, and an adapter that was evicted is loaded again."""
        count = planned.spec.num_adapters + 3
        talk = Conversation(planned)
        names = [replace(adapters[number % 4], name=f"adapter-{number}") for number in range(count)]
        for adapter in names:
            talk.engine.register_adapter(adapter)
        expected: dict[str, list[int]] = {}
        for number in [*range(count), 0, count - 1]:
            prompt = canary.prompt(number % canary.KEYS, LENGTH, seed=number)
            name = f"{number}-{len(expected)}"
            talk.submit(name, prompt, 12, adapter=names[number])
            expected[name] = self.walk(canary.under(prompt, 1 + number % 4), 12)
        assert talk.finish() == expected
