"""Each request has the same output as alone, for all batches, chunks, sizes of memory, with and without overlap."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from localllm.engine.batch import Batch
from localllm.engine.drafts import Drafter
from localllm.engine.engine import Engine
from localllm.engine.lora import Adapter
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec
from localllm.engine.sampling import candidates, draw

from .cache_check import check_cache
from .token_device import SPEC, TokenDevice, digest, finish_all, logits_of, outputs, solo

ADAPTERS = (None, Adapter("a", "/a", "1"), Adapter("b", "/b", "1"), Adapter("b", "/b", "2"))
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=2**63 + 11),
    Sampling(frequency_penalty=0.7, presence_penalty=0.4),
    Sampling(temperature=0.7, repetition_penalty=1.3, seed=3, logit_bias=((4, 3.0), (9, -20.0))),
)


def check_memory(engine: Engine) -> None:
    scheduler = engine._scheduler
    check_cache(scheduler._cache, [each.lease for each in scheduler._running if each.lease is not None])


@dataclass
class Modulo:
    """A grammar with a state. It allows tokens that equal `state` modulo 3; each token adds `step` to the state."""

    step: int
    length: int
    state: int = 0
    taken: list[int] = field(default_factory=list)

    def allowed(self) -> np.ndarray:
        bits = np.zeros(SPEC.vocab_size, np.uint8)
        bits[self.state :: 3] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def copy(self) -> Modulo:
        return replace(self, taken=list(self.taken))

    def accept(self, token: int) -> None:
        assert token % 3 == self.state, "a token came that was not allowed"
        self.state = (self.state + self.step) % 3
        self.taken.append(token)

    @property
    def finished(self) -> bool:
        return len(self.taken) == self.length


def requests_of(seed: int, count: int, longest: int = 60, plain: bool = False) -> list[Request]:
    """Requests that share prefixes and differ in all parameters. They are new in each call: grammars have states."""
    rng = random.Random(seed)
    stems = [[rng.randrange(SPEC.vocab_size) for _ in range(longest)] for _ in range(3)]
    made = []
    for number in range(count):
        cut = rng.randrange(longest)
        prompt = rng.choice(stems)[:cut] + [rng.randrange(SPEC.vocab_size) for _ in range(rng.randrange(1, 8))]
        grammar = Modulo(rng.randrange(3), rng.randrange(2, 30)) if rng.random() < 0.25 else None
        adapter = rng.choice(ADAPTERS[:3])
        made.append(
            Request(
                f"r{number}",
                tuple(prompt),
                rng.randrange(1, 30),
                rng.choice(SAMPLINGS),
                frozenset(rng.sample(range(SPEC.vocab_size), 3)) if rng.random() < 0.5 else frozenset(),
                None if plain else adapter,
                None if plain else grammar,
            )
        )
    return made


@dataclass
class Prophet:
    """A drafter that knows the outputs, and proposes each of their tokens with this probability, else another."""

    texts: list[list[int]]  # prompts with their outputs
    rng: random.Random
    acceptance: float

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        assert limit > 0
        following = [text[len(tokens) :] for text in self.texts if text[: len(tokens)] == tokens]
        if not following or self.rng.random() < 0.1:
            return []
        drafts = self.rng.choice(following)[: self.rng.randrange(limit + 3)]  # sometimes more than the limit
        return [token if self.rng.random() < self.acceptance else self.rng.randrange(100) for token in drafts]


def prophet(make: list[Request], spec: RunnerSpec, seed: int, acceptance: float) -> Prophet:
    return Prophet([[*each.prompt, *solo(each, spec)] for each in make], random.Random(seed), acceptance)


def serve(
    spec: RunnerSpec, requests: list[Request], seed: int = 0, cancel: float = 0.0, drafter: Drafter | None = None
) -> tuple[list[Delta], Engine]:
    """Requests join at random times and may be cancelled at random times."""
    rng = random.Random(seed)
    device = TokenDevice(spec, lazy=rng.random() < 0.7)
    engine = Engine(device, drafter=drafter)
    for adapter in ADAPTERS[1:3]:
        engine.register_adapter(adapter)
    deltas: list[Delta] = []
    coming = list(requests)
    while coming or engine.has_work:
        while coming and rng.random() < 0.4:
            engine.submit(coming.pop(0))
        if rng.random() < cancel:
            engine.cancel(f"r{rng.randrange(len(requests))}")
        deltas += engine.step()
        check_memory(engine)
    assert engine.stats().cache_used == 0
    return deltas, engine


def assert_equal_to_solo(deltas: list[Delta], make: list[Request], spec: RunnerSpec) -> None:
    """A finished request has the same output as alone; a cancelled one has a beginning of that output."""
    out = outputs(deltas)
    ends = [delta for delta in deltas if delta.finish]
    finish = {delta.request_id: delta.finish for delta in ends}
    assert len(ends) == len(finish) == len(make)
    for each in make:
        alone = solo(each, spec)
        if finish[each.id] == "cancelled":
            assert alone[: len(out[each.id])] == out[each.id]
        else:
            assert alone == out[each.id], each
    last = {delta.request_id: index for index, delta in enumerate(deltas)}
    assert all(deltas[index].finish for index in last.values()), "nothing comes after the end"


WITH_ADAPTERS = replace(SPEC, num_adapters=2, adapters_per_step=2)


def test_solo_itself_is_the_plain_loop() -> None:
    """Computes the expected tokens by hand: hash the context, draw, append."""
    device = TokenDevice(SPEC)
    engine = Engine(device)
    request = Request("r", (5, 6, 7), 12, Sampling(temperature=0.9, top_k=30, seed=77))
    engine.submit(request)
    finish_all(engine)
    tokens = list(request.prompt)
    for step in range(12):
        context = np.array(tokens)
        logits = logits_of([digest(context, np.arange(len(tokens)), np.zeros(len(tokens)))], SPEC.vocab_size)
        rows = device.batches[step].sampling
        assert rows.draw.tolist() == [len(tokens)]
        tokens.append(draw(candidates(logits, rows, 0, None), rows, 0))
    assert solo(request) == tuple(tokens[3:])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_plenty_of_room(seed: int, overlap: bool) -> None:
    spec = replace(WITH_ADAPTERS, overlap=overlap)
    deltas, engine = serve(spec, requests_of(seed, 24), seed)
    assert_equal_to_solo(deltas, requests_of(seed, 24), spec)
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_preemption_storms(seed: int, overlap: bool) -> None:
    """The KV cache has room for a tenth of the tokens of all requests."""
    demand = sum(len(each.prompt) + each.max_tokens for each in requests_of(seed, 30))
    spec = replace(WITH_ADAPTERS, overlap=overlap, groups=(CacheGroup(4, demand // 10 // 4),), max_rows=30)
    deltas, engine = serve(spec, requests_of(seed, 30), seed)
    assert_equal_to_solo(deltas, requests_of(seed, 30), spec)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_cancels(seed: int, overlap: bool) -> None:
    spec = replace(WITH_ADAPTERS, overlap=overlap, groups=(CacheGroup(4, 40),))
    deltas, _ = serve(spec, requests_of(seed, 40), seed, cancel=0.3)
    assert_equal_to_solo(deltas, requests_of(seed, 40), spec)
    assert {delta.finish for delta in deltas} >= {"cancelled", "length", None}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 7, 16, 61, 200])
def test_chunks_of_any_size(max_tokens: int, overlap: bool) -> None:
    spec = replace(WITH_ADAPTERS, overlap=overlap, max_tokens=max_tokens)
    deltas, _ = serve(spec, requests_of(3, 10), max_tokens)
    assert_equal_to_solo(deltas, requests_of(3, 10), spec)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 128])
def test_pages_of_any_size(page_size: int, overlap: bool) -> None:
    spec = replace(WITH_ADAPTERS, overlap=overlap, groups=(CacheGroup(page_size, 300 // page_size),))
    deltas, _ = serve(spec, requests_of(4, 12), page_size)
    assert_equal_to_solo(deltas, requests_of(4, 12), spec)


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_requests_in_parallel(overlap: bool) -> None:
    spec = replace(SPEC, overlap=overlap, groups=(CacheGroup(4, 30),))
    one = replace(requests_of(1, 1, plain=True)[0], max_tokens=25)
    deltas, _ = serve(spec, [replace(one, id=f"r{number}") for number in range(12)])
    assert set(outputs(deltas).values()) == {solo(one)}
    assert len(outputs(deltas)) == 12


def test_a_reloaded_adapter_reuses_nothing() -> None:
    old, new = ADAPTERS[2], ADAPTERS[3]
    engine = Engine(TokenDevice(WITH_ADAPTERS))
    for version in (old, new, old):
        assert version is not None
        engine.register_adapter(version)
        request = Request("r", tuple(range(20)), 10, adapter=version)
        engine.submit(request)
        deltas = finish_all(engine)
        assert outputs(deltas)["r"] == solo(request, WITH_ADAPTERS)
        assert deltas[0].cached == (19 if version is old and engine.stats().tokens_in == 60 else 0)


def test_another_scale_of_an_adapter_reuses_nothing() -> None:
    adapter = ADAPTERS[1]
    assert adapter is not None
    device = TokenDevice(WITH_ADAPTERS)
    engine = Engine(device)
    engine.register_adapter(adapter)
    outs = []
    for scale, cached in ((1.0, 0), (0.5, 0), (1.0, 19), (0.5, 19)):
        request = Request("r", tuple(range(20)), 10, adapter=adapter, adapter_scale=scale)
        engine.submit(request)
        deltas = finish_all(engine)
        outs.append(outputs(deltas)["r"])
        assert outs[-1] == solo(request, WITH_ADAPTERS)
        assert deltas[0].cached == cached
        assert device.batches[-1].adapter_scales.tolist() == [scale]
    assert outs[0] != outs[1]
    assert device.loads == [(1, adapter)], "the slot serves every scale"


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_must_be_a_number_and_have_an_adapter(scale: float) -> None:
    with pytest.raises(ValueError, match="adapter_scale must be a number from -100 to 100"):
        Request("r", (1,), 1, adapter=ADAPTERS[1], adapter_scale=scale)
    with pytest.raises(ValueError, match="adapter_scale needs an adapter"):
        Request("r", (1,), 1, adapter_scale=0.5)


def test_results_come_after_the_next_step_was_launched() -> None:
    """With overlap the device is never left without work: correct outputs alone would not show such a gap."""
    device = TokenDevice(replace(SPEC, overlap=True))
    engine = Engine(device)
    engine.submit(Request("r", (1, 2, 3), 6))
    finish_all(engine)
    assert device.log == ["run", *["run", "result"] * 5, "result"]
    assert [batch.carry.tolist() for batch in device.batches] == [[-1], *[[0]] * 5]


def test_without_overlap_nothing_is_carried() -> None:
    device = TokenDevice(SPEC)
    engine = Engine(device)
    engine.submit(Request("r", (1, 2, 3), 3))
    finish_all(engine)
    assert device.log == ["run", "result"] * 3
    assert all((batch.carry == -1).all() for batch in device.batches)


def test_draws_that_read_history_wait_for_it_and_others_do_not() -> None:
    device = TokenDevice(replace(SPEC, overlap=True))
    engine = Engine(device)
    engine.submit(Request("free", (1, 2, 3), 8))
    engine.submit(Request("history", (4, 5), 8, SAMPLINGS[3]))
    engine.submit(Request("grammar", (6,), 8, grammar=Modulo(1, 30)))
    finish_all(engine)
    rows = [batch.num_rows for batch in device.batches]
    assert rows[:8] == [3, 1, 3, 1, 3, 1, 3, 1]
    carried = [batch.carry.tolist() for batch in device.batches]
    assert carried[:4] == [[-1, -1, -1], [0], [0, -1, -1], [0]]


@dataclass
class Counting(TokenDevice):
    tokens: int = 0

    def compute(self, batch: Batch):
        self.tokens += batch.num_tokens
        return super().compute(batch)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_token_is_computed_twice_without_preemption(overlap: bool) -> None:
    device = Counting(replace(SPEC, overlap=overlap))
    engine = Engine(device)
    for number in range(6):
        engine.submit(Request(f"r{number}", tuple(range(number, 40)), 10))
    finish_all(engine)
    assert device.tokens == sum(40 - number + 9 for number in range(6))
