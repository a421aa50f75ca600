from __future__ import annotations

import random
from collections import Counter

import numpy as np

from localllm.engine.history import TokenHistory


def test_counts_equal_a_plain_count_however_long_it_grows() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(50) for _ in range(30)]
    history, output = TokenHistory(prompt), []
    for _ in range(2000):
        output.append(rng.randrange(1500))
        history.add(output[-1])
        if len(output) % 97 == 0:
            tokens, in_prompt, in_output = history.table
            assert dict(zip(tokens.tolist(), in_prompt.tolist(), strict=True)) == {
                token: prompt.count(token) for token in {*prompt, *output}
            }
            said = Counter(output)
            assert in_output.tolist() == [said[token] for token in tokens.tolist()]


def test_drafts_are_counted_in_a_copy() -> None:
    history = TokenHistory([5, 5, 7])
    history.add(7)
    before = history.table.tolist()
    assert history.after([]).tolist() == before
    assert history.after([9, 7, 9, 3]).tolist() == [[5, 7, 9, 3], [2, 1, 0, 0], [0, 2, 2, 1]]
    assert history.after([9]).dtype == np.int32
    assert history.table.tolist() == before == [[5, 7], [2, 1], [0, 1]]
