from __future__ import annotations

import random
from collections import Counter

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
