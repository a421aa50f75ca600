from __future__ import annotations

import pytest

from localllm.engine.graphs import bucket, token_sizes


@pytest.mark.parametrize(("size", "found"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_bucket(size: int, found: int | None) -> None:
    assert bucket(size, (1, 2, 4, 8)) == found


def test_token_sizes_add_an_eighth_at_most() -> None:
    sizes = token_sizes(2048)
    assert [len(token_sizes(most)) for most in (3, 32, 256, 512, 1024, 2048)] == [0, 8, 22, 30, 38, 46]
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == 2048
    assert all(bucket(tokens, sizes) <= tokens * 9 / 8 for tokens in range(129, 2049))
