"""Which tokens are computed next. Chunked prefill, prefix hits, resuming and decode are the same arithmetic.

    what a sequence needs = len(tokens) + unknown - computed
    a step gives          = min(needs, what is left of max_tokens); it draws a token iff nothing is then left

Running sequences come first, oldest first; then waiting ones in order of arrival, and the first that does not fit
stops the rest, so nobody starves. So does one that begins with a page which a row of this very step is computing: it
finds that page in the next step. Whoever runs is older than whoever waits. When memory runs out the youngest running
sequence gives up its own (to be computed again, as far as its pages are not still in the prefix tree).

schedule() may be called while one step is not committed yet: its tokens are then carried on the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from .batch import Batch
from .errors import CacheOverflow, ContextOverflow, EngineError, RequestRefused
from .grammar import allowed_tokens
from .history import TokenHistory
from .kv import KVCache, Lease
from .lora import AdapterPool
from .request import Delta, Finish, Request, Sequence, TokenLogprobs
from .rows import BatchBuilder, Row
from .runner import RunnerSpec, StepResult
from .stats import Stats


class Scheduler:
    """Owns every sequence from add() to its last delta. Not thread-safe."""

    def __init__(self, spec: RunnerSpec, cache: KVCache, adapters: AdapterPool) -> None:
        self._spec, self._cache, self._adapters = spec, cache, adapters
        self._builder = BatchBuilder()
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # hold a lease; oldest first
        self._waiting: deque[Sequence] = deque()  # oldest first
        self._launched: deque[list[Row]] = deque()  # planned and not committed, two at most
        self._ended: list[Delta] = []  # ends that no step brought about
        self._blocked = False  # the first that waits found no room, and none was freed since
        self._stats = Stats(cache_tokens=cache.total_tokens)

    @property
    def has_work(self) -> bool:
        """Something is to be planned, committed or told."""
        return bool(self._sequences or self._launched or self._ended)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that have not ended."""
        return tuple(self._sequences)

    def stats(self) -> Stats:
        return replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting),
            cache_used=self._cache.used_tokens,
        )

    def add(self, request: Request) -> None:
        """Take a request in. Raises RequestRefused (and its kinds) for what can never run."""
        self._refuse_impossible(request)
        sequence = Sequence(request)
        if request.sampling.reads_history:
            sequence.history = TokenHistory(request.prompt)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)

    def _refuse_impossible(self, request: Request) -> None:
        spec, prompt = self._spec, len(request.prompt)
        needed = prompt + request.max_tokens
        if request.id in self._sequences:
            raise RequestRefused(f"a request with the id {request.id!r} is running already")
        if needed > spec.max_context:
            raise ContextOverflow(needed, spec.max_context, prompt)
        longest = spec.longest
        if needed > longest:
            raise CacheOverflow(needed, longest)
        for name, ids in (("prompt", request.prompt), ("logit_bias", [id for id, _ in request.sampling.logit_bias])):
            if ids and not 0 <= min(ids) <= max(ids) < spec.vocab_size:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise RequestRefused(f"token id {wrong} in {name} is not in 0…{spec.vocab_size - 1}")
        adapter = request.adapter
        if adapter is not None and not (spec.num_adapters and spec.adapters_per_step):
            raise RequestRefused(f"adapter {adapter.name!r}: this backend runs no adapters")
        if adapter is not None and self._adapters.find(adapter.name) != adapter:
            raise RequestRefused(f"adapter {adapter.name!r} is not registered in this version")

    def cancel(self, request_id: str) -> bool:
        """End a request now; its memory is free for the next step. False: there is no such request (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end_early(sequence, "cancelled")
        return True

    def take_ended(self) -> list[Delta]:
        """Last deltas of requests that ended without a step: cancelled or failed."""
        ended, self._ended = self._ended, []
        return ended

    def schedule(self) -> Batch | None:
        """The next step; None if nothing can be computed now. It must be run, and committed in its turn."""
        assert len(self._launched) < 2, "an unknown token can only be carried from the step right before"
        rows: list[Row] = []
        budget, preemptions = self._spec.max_tokens, self._stats.preemptions
        for sequence in tuple(self._running):
            if budget and sequence.lease is not None:  # an older one may just have taken the lease away
                budget -= self._plan(sequence, sequence.lease, budget, rows)
        while budget and preemptions == self._stats.preemptions and (lease := self._admit_next(rows)) is not None:
            budget -= self._plan(self._running[-1], lease, budget, rows)
        if not rows:
            return None
        batch = self._builder.build(rows, *self._cache.take_copies())
        self._launch(rows)
        return batch

    def _plan(self, sequence: Sequence, lease: Lease, budget: int, rows: list[Row]) -> int:
        """Add the sequence's row, if it can have one; returns the tokens it takes."""
        unknown, start = sequence.unknown, sequence.computed
        length = len(sequence.tokens) + unknown
        if length >= sequence.limit:
            return 0  # its last token is on the way
        if unknown and sequence.needs_known_tokens:
            return 0
        end = min(length, start + budget)
        if end > lease.capacity and not self._make_room(sequence, lease, end):
            return 0
        draws = end == length
        row = Row(sequence, lease, start, end, sequence.last_row if unknown and draws else -1, draws)
        if draws and sequence.request.grammar is not None:
            try:
                row.masks = (allowed_tokens(sequence.request.grammar, self._spec.vocab_size),)
            except Exception as error:  # a grammar is foreign code: it may fail its request, not the engine
                self._end_early(sequence, "failed", f"the grammar failed: {error}")
                return 0
        sequence.computed = end
        rows.append(row)
        return end - start

    def _make_room(self, sequence: Sequence, lease: Lease, length: int) -> bool:
        """Let the youngest give up their memory until it suffices; False: the sequence itself had to."""
        while not self._cache.grow(lease, length):
            victim = self._running.pop()
            self._release(victim)
            victim.preemptions += 1
            self._stats.preemptions += 1
            self._waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True

    def _admit_next(self, rows: list[Row]) -> Lease | None:
        """Let the first that waits join, with room for all its tokens; None: nobody waits or it has to wait on."""
        while self._waiting and not self._blocked and len(self._running) < self._spec.max_rows:
            sequence = self._waiting[0]
            if self._gains_by_waiting(sequence, rows):
                return None
            try:
                lease = self._acquire(sequence)
            except EngineError as error:  # its adapter does not load
                self._end_early(sequence, "failed", str(error))
                continue
            if lease is None:
                self._blocked = True
                return None
            self._running.append(self._waiting.popleft())
            sequence.lease, sequence.computed = lease, lease.cached
            if not sequence.preemptions:
                sequence.cached = lease.cached
                self._stats.tokens_in += len(sequence.tokens)
                self._stats.prefix_hit_tokens += lease.cached
            return lease
        return None

    def _gains_by_waiting(self, sequence: Sequence, rows: list[Row]) -> bool:
        """For one step at most for each page of its own: equal prompts that come together are computed once."""
        space, tokens = sequence.request.namespace, sequence.tokens
        return any(self._cache.will_find_more(space, tokens, row.lease, row.sequence.tokens, row.end) for row in rows)

    def _acquire(self, sequence: Sequence) -> Lease | None:
        """Adapter slot and cache memory, both or none."""
        adapter, slot = sequence.request.adapter, 0
        if adapter is not None:
            free = self._adapters.acquire(adapter)
            if free is None:
                return None
            slot = free
        lease = self._cache.open(sequence.request.namespace, sequence.tokens)
        if lease is not None and self._cache.grow(lease, len(sequence.tokens)):
            sequence.adapter_slot = slot
            return lease
        if lease is not None:
            self._cache.close(lease)
        if adapter is not None:
            self._adapters.release(adapter)
        return None

    def _launch(self, rows: list[Row]) -> None:
        """From here on the step counts as run: later steps may build on what it writes."""
        for index, row in enumerate(rows):
            sequence = row.sequence
            if row.wants_token:
                sequence.unknown += 1
                sequence.last_row = index
            self._cache.share(row.lease, sequence.tokens, sequence.computed)
        self._launched.append(rows)
        self._stats.steps += 1

    def commit(self, result: StepResult) -> list[Delta]:
        """Take in what the oldest uncommitted step gave."""
        tokens = result.tokens.tolist()
        starts = result.row_starts.tolist()
        deltas = []
        for index, row in enumerate(self._launched.popleft()):
            if row.wants_token and row.sequence.finish is None:
                deltas.append(self._take_in(row.sequence, tokens[starts[index]], starts[index], result))
        self._stats.tokens_out += len(deltas)
        self._stats.late_compiles += result.late_compiles
        return deltas

    def give_up(self, error: str) -> None:
        """Steps that were planned and are not committed were not computed: their requests end."""
        lost = [row.sequence for rows in self._launched for row in rows]
        self._launched.clear()
        for sequence in lost:
            if sequence.finish is None:
                self._end_early(sequence, "no_memory", error)
        self._cache.forget()  # what the steps were to write counted as shared already

    def _take_in(self, sequence: Sequence, token: int, index: int, result: StepResult) -> Delta:
        request, error = sequence.request, ""
        finish: Finish | None = None
        sequence.tokens.append(token)
        sequence.unknown -= 1
        if sequence.history is not None:
            sequence.history.add(token)
        if token in request.stop_ids:
            finish = "stop"
        elif request.grammar is not None:
            try:
                request.grammar.accept(token)
                finish = "stop" if request.grammar.finished else None
            except Exception as failure:  # as in _plan
                finish, error = "failed", f"the grammar failed: {failure}"
        if finish is None and len(sequence.tokens) == sequence.limit:
            finish = "length"
        if finish is not None:
            self._remove(sequence, finish)
        asked = request.sampling.logprobs
        logprobs = () if asked is None else (_logprobs(result, index, token, asked),)
        return Delta(request.id, (token,), logprobs, finish, sequence.cached, error)

    def _end_early(self, sequence: Sequence, finish: Finish, error: str = "") -> None:
        self._remove(sequence, finish)
        self._ended.append(Delta(sequence.request.id, (), (), finish, sequence.cached, error))

    def _remove(self, sequence: Sequence, finish: Finish) -> None:
        sequence.finish = finish
        del self._sequences[sequence.request.id]
        if sequence.lease is None:
            self._waiting.remove(sequence)
            self._blocked = False
        else:
            self._running.remove(sequence)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give up cache memory and adapter slot; what was computed stays for a later prefix hit."""
        assert sequence.lease is not None
        self._cache.share(sequence.lease, sequence.tokens, sequence.computed)
        self._cache.close(sequence.lease)
        sequence.lease = None
        if sequence.request.adapter is not None:
            self._adapters.release(sequence.request.adapter)
        self._blocked = False


def _logprobs(result: StepResult, row: int, token: int, count: int) -> TokenLogprobs:
    if result.logprobs is None or result.top_tokens is None or result.top_logprobs is None:
        raise EngineError("the backend gave no log-probabilities although a row asked for them")
    top = zip(result.top_tokens[row, :count].tolist(), result.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprobs(token, float(result.logprobs[row]), tuple(top))
