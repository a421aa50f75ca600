"""Builds batches by hand, so that a test can run a runner without the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from localllm.engine.batch import Batch, SampleSettings, Want
from localllm.engine.request import Sampling
from localllm.engine.runner import Runner, StepResult

GREEDY = Sampling()


@dataclass
class Row:
    """A row of a batch: `tokens` start at position `start` of a sequence with the cache pages `pages`."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    want: Want = Want.TOKEN
    carry: int = -1
    sampling: Sampling = GREEDY
    prompt: Sequence[int] = ()  # history for penalties
    output: Sequence[int] = ()
    mask: np.ndarray | None = None  # [vocab] of allowed tokens
    state: int = -1  # slot of the recurrent state
    draw: int | None = None  # default: the position after the last token


def make_batch(
    rows: Sequence[Row],
    vocab: int,
    copies: Sequence[tuple[int, int]] = (),
    groups: int = 1,
    state_copies: Sequence[tuple[int, int]] = (),
) -> Batch:
    """`groups`: number of cache groups, which get the same pages. None of them passes a page."""
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)]).astype(np.int32)
    width = max(len(row.pages) for row in rows)
    samples = [row for row in rows if row.want != Want.NOTHING]
    masked = [index for index, row in enumerate(samples) if row.mask is not None]
    words = -(-vocab // 32)
    masks = np.zeros((len(masked), words), np.uint32)
    for at, index in enumerate(masked):
        bits = np.zeros(words * 32, np.uint8)
        bits[:vocab] = samples[index].mask
        masks[at] = np.packbits(bits, bitorder="little").view(np.uint32)
    return Batch(
        tokens=np.concatenate([np.asarray(row.tokens, np.int32) for row in rows]),
        positions=np.concatenate([np.arange(row.start, row.start + len(row.tokens), dtype=np.int32) for row in rows]),
        row_starts=starts,
        drafts=np.zeros(len(rows), np.int32),
        page_tables=(np.array([[*row.pages, *[0] * (width - len(row.pages))] for row in rows], np.int32),) * groups,
        states=np.array([row.state for row in rows], np.int32),
        adapters=np.zeros(len(rows), np.int32),
        adapter_scales=np.ones(len(rows), np.float32),
        carry=np.array([row.carry for row in rows], np.int32),
        wants=np.array([row.want for row in rows], np.uint8),
        sampling=sample_settings(samples),
        mask_samples=np.array(masked, np.int32),
        masks=masks,
        page_copies=(np.array(copies, np.int32).reshape(-1, 2),) * groups,
        state_copies=np.array(state_copies, np.int32).reshape(-1, 2),
    )


def sample_settings(rows: Sequence[Row]) -> SampleSettings:
    """The sampling parameters of a step in which each row draws one token."""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row.sampling, name) for row in rows], dtype)

    biases = [(index, token, value) for index, row in enumerate(rows) for token, value in row.sampling.logit_bias]
    history = [
        (index, token, list(row.prompt).count(token), list(row.output).count(token))
        for index, row in enumerate(rows)
        if row.sampling.reads_history
        for token in sorted({*row.prompt, *row.output})
    ]
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    draws = [row.start + len(row.tokens) if row.draw is None else row.draw for row in rows]
    logprobs = [-1 if row.sampling.logprobs is None else row.sampling.logprobs for row in rows]

    def entries(values: list, at: int, dtype: type = np.int32) -> np.ndarray:
        return np.array([entry[at] for entry in values], dtype)

    return SampleSettings(
        **{name: column(name, np.float32) for name in floats},
        top_k=column("top_k", np.int32),
        seed=column("seed", np.uint64),
        draw=np.array(draws, np.int32),
        logprobs=np.array(logprobs, np.int32),
        bias_samples=entries(biases, 0),
        bias_tokens=entries(biases, 1),
        bias_values=entries(biases, 2, np.float32),
        history_samples=entries(history, 0),
        history_tokens=entries(history, 1),
        history_prompt=entries(history, 2),
        history_output=entries(history, 3),
    )


@dataclass
class Solo:
    """One sequence on a runner, which computes one step after the other."""

    runner: Runner
    pages: Sequence[int]
    tokens: list[int] = field(default_factory=list)

    def feed(self, tokens: Sequence[int], chunk: int | None = None, sampling: Sampling = GREEDY) -> StepResult:
        """Compute these tokens, at most `chunk` in a step. Returns the result of the last step."""
        chunk = chunk or len(tokens)
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            row = Row(part, len(self.tokens), self.pages, sampling=sampling, state=0)
            self.tokens += part
            spec = self.runner.spec
            batch = make_batch([row], spec.vocab_size, groups=len(spec.groups))
            result = self.runner.run(batch).result()
        return result

    def generate(self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
        drawn = [int(self.feed(prompt, sampling=sampling).tokens[0])]
        while len(drawn) < count:
            drawn.append(int(self.feed(drawn[-1:], sampling=sampling).tokens[0]))
        return drawn
