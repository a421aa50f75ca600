"""Greedy tokens that the device chooses: llama.cpp's samplers, and the sequences that have one.

A sampler belongs to a sequence id, and its op is a part of the graph. The host then reads one token, not the logits of
the whole vocabulary. If any output of a step belongs to an id without a sampler, llama.cpp copies the logits of all
outputs. A change of the samplers allocates the graphs anew, so the ids keep theirs, and the rows change their ids:

    ids         0 … count-1: with a sampler     from `count` on: without one
    rows        with plain answers              with other answers

A row without an answer has any id. If several tokens have the largest logit, the host chooses the first of them, and
ggml chooses another one: the last on a CPU, any on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints, Want
from .library import library
from .sequences import Memory, PagedSequences, Sequence

# Experimental functions of llama.cpp, which a later version may lack.
FUNCTIONS = (
    "llama_set_sampler",
    "llama_get_sampled_token_ith",
    "llama_sampler_chain_init",
    "llama_sampler_init_greedy",
)
PROBE_TOKENS = 2  # of the step of choose_largest


def plain_answers(batch: Batch) -> NDArray[np.bool_]:
    """Whether an answer is the token with the largest logit, and needs nothing else of its logits [answers]."""
    sampling = batch.sampling
    wants = batch.wants[batch.wants != Want.NOTHING]
    plain: NDArray[np.bool_] = (wants == Want.TOKEN) & (sampling.temperature == 0) & (sampling.logprobs < 0)
    for answers in (sampling.bias_answers, sampling.history_answers, batch.mask_answers):
        plain[answers] = False
    return plain


class GreedySequences(PagedSequences):
    """Gives ids with a sampler to the rows with plain answers, and other ids to the rows with other answers. At least
    one id is free before each step."""

    def __init__(self, memory: Memory, page_size: int, count: int, samplers: int) -> None:
        """`samplers`: the number of ids with a sampler. Each kind has an id for each row of a step."""
        super().__init__(memory, page_size, count)
        self._samplers = samplers

    def _arrange(self, sequences: list[Sequence], batch: Batch) -> None:
        """Move sequences to ids of the kind that their answers need."""
        rows = np.flatnonzero(batch.wants != Want.NOTHING).tolist()
        kinds = {sequences[row]: plain for row, plain in zip(rows, plain_answers(batch).tolist(), strict=True)}
        for sequence, plain in kinds.items():
            if self._has_sampler(sequence.id) != plain:
                self._move(sequence, self._free_id(plain, kinds.keys()))

    def _has_sampler(self, sequence: int) -> bool:
        return sequence < self._samplers

    def _free_id(self, plain: bool, answering: Collection[Sequence]) -> int:
        """A free id, with a sampler if `plain`. `answering`: the sequences with an answer in this step."""
        while True:
            for free in reversed(self._free):
                if self._has_sampler(free) == plain:
                    return free
            if self._free:
                others = (each for each in self._sequences.values() if each not in answering)
                self._move(next(each for each in others if self._has_sampler(each.id) == plain), self._free[-1])
            else:
                self._cut(self._redundant_sequence(), 0)


class GreedySamplers:
    """llama.cpp's samplers of a context. `close` frees them when the context is freed."""

    def __init__(self, ids: Ints) -> None:
        """`ids`: the ids of the sequences that get samplers: see sequences.sequence_ids."""
        self._c = library().c
        self.num_sequences = len(ids)
        self._ids: list[int] = ids.ravel().tolist()
        self._chains = [self._chain() for _ in self._ids]

    def _chain(self) -> Any:
        chain = self._c.llama_sampler_chain_init(self._c.llama_sampler_chain_default_params())
        self._c.llama_sampler_chain_add(chain, self._c.llama_sampler_init_greedy())
        return chain

    def configs(self) -> Any:
        """The field `samplers` of the parameters of a context."""
        configs = (self._c.llama_sampler_seq_config * len(self._ids))()
        for config, sequence, chain in zip(configs, self._ids, self._chains, strict=True):
            config.seq_id = sequence
            config.sampler = ctypes.cast(chain, ctypes.c_void_p)
        return configs

    def choose_largest(self, context: Any, other: int, vocab: int) -> bool:
        """Whether the token that the device chooses has the largest logit. Computes a step with the first id and with
        the id `other`, which has no sampler. All cells of the context are free before and after it."""
        batch = self._c.llama_batch_init(PROBE_TOKENS, 0, 1)
        batch.n_tokens = PROBE_TOKENS
        for index, sequence in enumerate((self._ids[0], other)):
            batch.token[index] = index % vocab
            batch.pos[index] = 0
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = True
        code = self._c.llama_decode(context, batch)
        token = -1 if code else self._c.llama_get_sampled_token_ith(context, 0)
        largest = False
        if 0 <= token < vocab:
            logits = np.ctypeslib.as_array(self._c.llama_get_logits(context), (PROBE_TOKENS, vocab))[0]
            largest = bool(logits[token] == logits.max())
        self._c.llama_batch_free(batch)
        self._c.llama_memory_clear(self._c.llama_get_memory(context), False)
        return largest

    def remove(self, context: Any) -> None:
        """Remove the samplers from the context, and free them."""
        for sequence in self._ids:
            self._c.llama_set_sampler(context, sequence, None)
        self.close()

    def close(self) -> None:
        for chain in self._chains:
            self._c.llama_sampler_free(chain)
        self._chains.clear()
