"""Plans steps: the rows and tokens of each. One formula serves chunked prefill, prefix hits, resuming and decode.

    missing positions of a sequence = len(tokens) + unknown - computed
    tokens of its row in a step     = min(missing positions, tokens left of max_tokens)
    a row draws a token, or returns a hidden state, if it computes all missing positions

Running sequences come first, oldest first. Waiting sequences follow in order of arrival. If the first of them does not
fit, all wait, so none starves. A sequence that waits for its adapter lets a limited number of later ones start before
it. A sequence also waits if a row of the same step computes its first missing page: the page is a prefix hit in the
next step. If memory runs out, the youngest running sequence is preempted: it releases its
memory and is computed again, except for pages in the prefix tree.

schedule() may be called while one step is not committed yet: the next step carries its tokens on the device. A row
with drafts is the exception: its sequence waits for the commit, which says how many drafts were accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from .batch import Batch
from .drafts import Drafter, follow, usable
from .errors import CacheOverflow, ContextOverflow, EngineError, RequestRefused
from .grammar import Grammar, allowed_tokens
from .history import TokenHistory
from .kv import KVCache, Lease
from .lora import Adapter, AdapterPool
from .request import Delta, Finish, Request, Sequence, TokenLogprobs
from .rows import BatchBuilder, Row
from .runner import RunnerSpec, StepResult
from .stats import Stats

# Number of later sequences that may start before one that waits for its adapter: for the end of the load, or for a slot
# that running sequences with other adapters use. It also limits the waiting sequences that a step looks at.
MAX_OVERTAKING = 64


@dataclass(slots=True)
class Launched:
    """A step that is not committed yet."""

    rows: list[Row]
    released: list[Adapter] = field(default_factory=list)  # slots that this step may still read, released at its commit


class Scheduler:
    """Keeps every sequence from add() to its last delta. Not thread-safe."""

    def __init__(self, spec: RunnerSpec, cache: KVCache, adapters: AdapterPool, drafter: Drafter | None = None) -> None:
        """Raises EngineError if there is a drafter, but the runner verifies no drafts."""
        if drafter is not None and not spec.max_drafts:
            raise EngineError("the runner verifies no drafts: RunnerSpec.max_drafts is 0")
        if drafter is not None and spec.num_states:
            raise EngineError("the runner verifies no drafts: its recurrent states cannot undo a rejected draft")
        self._spec = spec
        self._cache = cache
        self._adapters = adapters
        self._drafter = drafter
        self._snapshots = bool(cache.snapshot_interval)
        self._builder = BatchBuilder()
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # sequences with a lease, oldest first
        self._waiting: deque[Sequence] = deque()  # sequences without a lease, oldest first
        self._launched: deque[Launched] = deque()  # steps that are not committed yet, at most two
        self._ended: list[Delta] = []  # the last deltas of requests that ended outside a step
        self._blocked = False  # True: no waiting sequence can start until something is freed
        self._stats = Stats(cache_tokens=cache.total_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a step must be planned or committed, or `take_ended` has deltas."""
        return bool(self._sequences or self._launched or self._ended)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has deltas."""
        return bool(self._ended)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the requests that have not ended."""
        return tuple(self._sequences)

    def stats(self) -> Stats:
        return replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting),
            cache_used=self._cache.used_tokens,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused, or a subclass of it, for a request that can never run."""
        self._refuse_impossible(request)
        sequence = Sequence(request)
        if request.sampling.reads_history:
            sequence.history = TokenHistory(request.prompt)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)
        if request.adapter is not None:
            self._adapters.begin(request.adapter)

    def _refuse_impossible(self, request: Request) -> None:
        if request.id in self._sequences:
            raise RequestRefused(f"a request with the id {request.id!r} is running already")
        prompt = len(request.prompt)
        needed = prompt + request.max_tokens
        if needed > self._spec.max_context:
            raise ContextOverflow(needed, self._spec.max_context, prompt)
        if needed > self._spec.max_length:
            raise CacheOverflow(needed, self._spec.max_length)
        self._refuse_unknown_tokens("prompt", request.prompt)
        self._refuse_unknown_tokens("logit_bias", [token for token, _ in request.sampling.logit_bias])
        if request.wants_hidden and not self._spec.hidden_size:
            raise RequestRefused("this backend returns no hidden states of this model")
        if request.adapter is not None:
            self._refuse_unusable(request.adapter)

    def _refuse_unknown_tokens(self, field: str, tokens: Collection[int]) -> None:
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self._spec.vocab_size:
                raise RequestRefused(f"token id {token} in {field} is not in 0…{self._spec.vocab_size - 1}")

    def _refuse_unusable(self, adapter: Adapter) -> None:
        if not min(self._spec.num_adapters, self._spec.adapters_per_step):
            raise RequestRefused(f"adapter {adapter.name!r}: this backend runs no adapters")
        if self._adapters.find(adapter.name) != adapter:
            raise RequestRefused(f"adapter {adapter.name!r} is not registered in this version of its files")

    def cancel(self, request_id: str) -> bool:
        """End a request now; the next step can use its memory. Returns False if there is no such request, or if it has
        ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end_early(sequence, "cancelled")
        return True

    def take_ended(self) -> list[Delta]:
        """The last deltas of requests that ended outside a step, because they were cancelled or failed."""
        ended = self._ended
        self._ended = []
        return ended

    def schedule(self) -> Batch | None:
        """The next step; None if nothing can be computed now. The caller runs it and commits its result."""
        assert len(self._launched) < 2, "an unknown token can only be carried from the step right before"
        rows: list[Row] = []
        preemptions = self._stats.preemptions
        budget = self._plan_running(rows)
        while budget and preemptions == self._stats.preemptions:
            lease = self._admit_next(rows)
            if lease is None:
                break
            budget -= self._plan(self._running[-1], lease, budget, 0, rows)
        if not rows:
            return None
        batch = self._builder.build(rows, *self._cache.take_copies(), self._cache.take_freed())
        self._launch(rows)
        return batch

    def _plan_running(self, rows: list[Row]) -> int:
        """Add the rows of running sequences. Returns the number of tokens that the step has left."""
        budget = self._spec.max_tokens
        running = tuple(self._running)
        younger = len(running)
        for sequence in running:
            younger -= 1  # one token of the budget is reserved for each younger sequence
            lease = sequence.lease
            if budget and lease is not None:  # None: this call preempted the sequence for an older one
                budget -= self._plan(sequence, lease, budget, younger, rows)
        return budget

    def _plan(self, sequence: Sequence, lease: Lease, budget: int, reserve: int, rows: list[Row]) -> int:
        """Add a row for the sequence, if it can compute something now. Returns the number of tokens in the row, at most
        `budget`.

        Drafts use none of the last `reserve` tokens of the budget, which other sequences need."""
        start = sequence.computed
        length = len(sequence.tokens) + sequence.unknown
        if length >= sequence.limit:
            return 0  # the running step draws the sequence's last token, or returns its hidden state
        carry = -1
        if sequence.unknown:
            if self._waits_for_token(sequence):
                return 0
            carry = sequence.last_row
        end = min(length, start + budget)
        if self._snapshots:
            end = self._cache.step_end(start, end, end == length)
        if end > lease.capacity and not self._make_room(sequence, lease, end):
            return 0
        if end < length:
            row = Row(sequence, lease, start, end, -1, False)
        else:
            row = Row(sequence, lease, start, end, carry, True)
            if self._drafter is not None or sequence.request.grammar is not None:
                self._add_drafts(row, budget - reserve - (end - start))
                if not self._add_masks(row):
                    return 0
        sequence.computed = end
        rows.append(row)
        return end - start + len(row.drafts)

    def _waits_for_token(self, sequence: Sequence) -> bool:
        """Whether the sequence must wait until the host knows the token that the device has drawn.

        It must wait if the host computes the next step's inputs from this token (drafts, penalties, grammar). It also
        waits if drafts are likely: once the token is known, they save a step."""
        if sequence.drafting or sequence.history is not None or sequence.request.grammar is not None:
            return True
        if self._drafter is None:
            return False
        return bool(self._drafter.propose(sequence.tokens, self._spec.max_drafts))

    def _add_drafts(self, row: Row, limit: int) -> None:
        """Add drafts to the row, as many as fit into the step, the request and the free cache memory. Drafts preempt no
        sequence."""
        sequence = row.sequence
        limit = min(limit, self._spec.max_drafts, sequence.limit - row.end - 1)
        if self._drafter is None or sequence.unknown or limit < 1:
            return
        proposal = self._drafter.propose(sequence.tokens, limit)[:limit]
        drafts = usable(proposal, sequence.request.stop_ids, self._spec.vocab_size)
        if row.end + len(drafts) > row.lease.capacity:
            self._cache.grow(row.lease, row.end + len(drafts))
        row.drafts = drafts[: row.lease.capacity - row.end]

    def _add_masks(self, row: Row) -> bool:
        """If the request has a grammar, add the masks of allowed tokens to the row. Returns False if the grammar
        failed; then the request has ended."""
        grammar = row.sequence.request.grammar
        if grammar is None:
            return True
        try:
            mask = allowed_tokens(grammar, self._spec.vocab_size)
            row.masks = (mask,)
            if row.drafts:
                row.drafts, masks = follow(grammar, mask, row.drafts, self._spec.vocab_size)
                row.masks += masks
        except Exception as error:  # a grammar is foreign code: its error ends only its request
            self._end_early(row.sequence, "failed", f"the grammar failed: {error}")
            return False
        return True

    def _make_room(self, sequence: Sequence, lease: Lease, length: int) -> bool:
        """Preempt the youngest sequences until `length` positions of this sequence fit. Returns False if this sequence
        itself was preempted."""
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
        """Move a waiting sequence to the running ones: the first that does not wait for its adapter. Returns its lease,
        which has pages for all its tokens. None: no sequence can start yet."""
        if self._blocked or len(self._running) >= self._spec.max_rows:
            return None
        index = 0
        while index < min(len(self._waiting), MAX_OVERTAKING):
            sequence = self._waiting[index]
            if self._gains_by_waiting(sequence, rows):
                return None
            try:
                has_adapter = self._acquire_adapter(sequence)
            except EngineError as error:  # the adapter could not be loaded
                self._end_early(sequence, "failed", str(error))
                continue
            if has_adapter:
                return self._admit(sequence, index)
            if sequence.overtaken >= MAX_OVERTAKING:
                self._blocked = not self._adapters.is_loading
                return None
            index += 1
        return None

    def _admit(self, sequence: Sequence, index: int) -> Lease | None:
        """Move the sequence at this index of the waiting ones, which has its adapter, to the running ones. Returns its
        lease. None: there is not enough memory."""
        lease = self._open_lease(sequence)
        if lease is None:
            if sequence.request.adapter is not None:
                self._adapters.release(sequence.request.adapter)
            self._blocked = not self._adapters.is_loading  # an earlier sequence may start when its load ends
            return None
        del self._waiting[index]
        for earlier in islice(self._waiting, index):
            earlier.overtaken += 1
        self._running.append(sequence)
        sequence.lease = lease
        sequence.computed = lease.cached
        if not sequence.preemptions:
            sequence.cached = lease.cached
            self._stats.tokens_in += len(sequence.tokens)
            self._stats.prefix_hit_tokens += lease.cached
        return lease

    def _gains_by_waiting(self, sequence: Sequence, rows: list[Row]) -> bool:
        """Whether the prefix hit of this waiting sequence will be longer after the step of `rows`. If it waits, equal
        prompts are computed only once.

        A sequence waits at most one step for each of its pages."""
        namespace = sequence.request.namespace
        for row in rows:
            if self._cache.will_find_more(namespace, sequence.tokens, row.lease, row.sequence.tokens, row.end):
                return True
        return False

    def _acquire_adapter(self, sequence: Sequence) -> bool:
        """Get the adapter slot of the sequence, if it has an adapter. Returns False if the sequence must wait for it.
        Raises EngineError if the adapter could not be loaded."""
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        slot = self._adapters.acquire(adapter)
        if slot is None:
            return False
        sequence.adapter_slot = slot
        return True

    def _open_lease(self, sequence: Sequence) -> Lease | None:
        """Cache memory for all tokens of the sequence; None if they do not fit."""
        lease = self._cache.open(sequence.request.namespace, sequence.tokens)
        if lease is None:
            return None
        if not self._cache.grow(lease, len(sequence.tokens)):
            self._cache.close(lease)
            return None
        return lease

    def _launch(self, rows: list[Row]) -> None:
        """Record that the step is launched. From now on later steps may read the positions that it writes."""
        for index, row in enumerate(rows):
            sequence = row.sequence
            if row.has_sample:
                sequence.unknown += 1
                sequence.last_row = index
                sequence.drafting = bool(row.drafts)
            if sequence.computed >= row.lease.next_share:
                self._cache.share(row.lease, sequence.tokens, sequence.computed)
        self._launched.append(Launched(rows))
        self._stats.steps += 1

    def commit(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest uncommitted step. Raises EngineError if the result does not fit the step."""
        tokens = result.tokens.tolist()
        starts = result.row_starts.tolist()
        deltas = []
        step = self._launched.popleft()
        self._release_adapters(step)
        for row, start, end in zip(step.rows, starts[:-1], starts[1:], strict=True):
            if not row.has_sample or row.sequence.finish is not None:
                continue
            if row.sequence.request.wants_hidden:
                deltas.append(self._finish_with_hidden(row.sequence, start, result))
            else:
                deltas.append(self._append_tokens(row, tokens[start:end], start, result))
        self._stats.tokens_out += sum([len(delta.tokens) for delta in deltas])
        self._stats.late_compiles += result.late_compiles
        return deltas

    def give_up(self, error: str) -> None:
        """End the requests of all uncommitted steps, because these steps were not computed."""
        lost = list(self._launched)
        self._launched.clear()
        for step in lost:
            self._release_adapters(step)
        for row in chain.from_iterable(step.rows for step in lost):
            if row.sequence.finish is None:
                self._end_early(row.sequence, "no_memory", error)
        self._cache.evict_all()  # pages that these steps should have written are in the prefix tree already

    def _append_tokens(self, row: Row, tokens: list[int], first: int, result: StepResult) -> Delta:
        """Append the drawn tokens of a row to its sequence, up to the end of the request. `first`: index of the row's
        first result in `result`."""
        sequence = row.sequence
        request = sequence.request
        text = sequence.tokens
        finish: Finish | None = None
        error = ""
        if row.drafts or len(tokens) != 1:
            self._accept_drafts(row, tokens)
        sequence.unknown -= 1
        for token in tokens:
            text.append(token)
            if sequence.history is not None:
                sequence.history.add(token)
            if token in request.stop_ids:
                finish = "stop"
            elif request.grammar is not None:
                finish, error = _follow(request.grammar, token)
            if finish is None and len(text) == sequence.limit:
                finish = "length"
            if finish is not None:
                tokens = tokens[: len(text) - row.end]
                self._remove(sequence, finish)
                break
        listed = request.sampling.logprobs
        logprobs = () if listed is None else _logprobs(result, first, tokens, listed)
        return Delta(request.id, tuple(tokens), logprobs, finish, sequence.cached, error)

    def _finish_with_hidden(self, sequence: Sequence, index: int, result: StepResult) -> Delta:
        """End a sequence with its hidden state, which has the index `index` in `result`."""
        if result.hidden is None:
            raise EngineError("the backend returned no hidden states, although a request wants one")
        sequence.unknown -= 1
        self._remove(sequence, "stop")
        hidden = result.hidden[index].copy()  # the delta must not keep the array of the whole step
        return Delta(sequence.request.id, (), (), "stop", sequence.cached, hidden=hidden)

    def _accept_drafts(self, row: Row, tokens: list[int]) -> None:
        """Count the positions of accepted drafts as computed. Raises EngineError if the drawn tokens contradict the
        drafts."""
        if not 1 <= len(tokens) <= 1 + len(row.drafts):
            raise EngineError(f"the backend drew {len(tokens)} tokens for a row with {len(row.drafts)} drafts")
        if tuple(tokens[:-1]) != row.drafts[: len(tokens) - 1]:
            raise EngineError("the backend accepted a draft, but returned a different token at its position")
        row.sequence.computed += len(tokens) - 1
        row.sequence.drafting = False

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
        if sequence.request.adapter is not None:
            self._adapters.end(sequence.request.adapter)

    def _release(self, sequence: Sequence) -> None:
        """Release the sequence's cache memory and adapter slot. Computed pages stay cached for prefix hits."""
        assert sequence.lease is not None
        self._cache.share(sequence.lease, sequence.tokens, sequence.computed)
        self._cache.close(sequence.lease)
        sequence.lease = None
        self._release_adapter(sequence)
        self._blocked = False

    def _release_adapter(self, sequence: Sequence) -> None:
        """Release the sequence's adapter slot. A step that is still computed may read the slot, so it is free for
        another adapter only after the commit of that step."""
        adapter = sequence.request.adapter
        if adapter is None:
            return
        if self._launched:
            self._launched[-1].released.append(adapter)
        else:
            self._adapters.release(adapter)

    def _release_adapters(self, step: Launched) -> None:
        """Release the adapter slots that waited for the end of this step."""
        for adapter in step.released:
            self._adapters.release(adapter)
        if step.released:
            self._blocked = False


def _follow(grammar: Grammar, token: int) -> tuple[Finish | None, str]:
    """Advance the grammar by a token. Returns (the finish that this token causes or None, the error or "")."""
    try:
        grammar.accept(token)
        finished = grammar.finished
    except Exception as failure:  # foreign code, as in _add_masks
        return "failed", f"the grammar failed: {failure}"
    return ("stop" if finished else None), ""


def _logprobs(result: StepResult, first: int, tokens: list[int], count: int) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of `tokens`, whose results begin at index `first`, with the `count` likeliest tokens of
    each."""
    if result.logprobs is None or result.top_tokens is None or result.top_logprobs is None:
        raise EngineError("the backend returned no log-probabilities, although a request lists them")
    listed: list[TokenLogprobs] = []
    for index, token in enumerate(tokens, first):
        top = zip(result.top_tokens[index, :count].tolist(), result.top_logprobs[index, :count].tolist(), strict=True)
        listed.append(TokenLogprobs(token, float(result.logprobs[index]), tuple(top)))
    return tuple(listed)
