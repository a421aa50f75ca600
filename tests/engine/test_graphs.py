from __future__ import annotations

import pytest

from localllm.engine.graphs import bucket, decode_sizes, limited_sizes, token_sizes


@pytest.mark.parametrize(("size", "found"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_bucket(size: int, found: int | None) -> None:
    assert bucket(size, (1, 2, 4, 8)) == found


def test_token_sizes_bound_the_padding() -> None:
    sizes = token_sizes(2048)
    assert [len(token_sizes(most)) for most in (3, 32, 256, 512, 1024, 2048)] == [0, 8, 22, 30, 38, 46]
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == 2048
    assert all(bucket(tokens, sizes) <= tokens * 9 / 8 for tokens in range(129, 2049))


def test_decode_sizes_bound_the_padding() -> None:
    sizes = decode_sizes(1000)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, 1001):
        size = bucket(rows, sizes)
        assert size is not None
        assert size - rows <= (0 if rows <= 2 else 3 if rows <= 12 else 7 if rows <= 256 else 15 if rows <= 512 else 31)


@pytest.mark.parametrize("most", [1, 3, 4, 5, 12, 13, 256, 257, 511, 512, 513, 1000])
def test_the_last_decode_size_fits_all_rows(most: int) -> None:
    *others, last = decode_sizes(most)
    assert last >= most
    assert all(size < most for size in others)


@pytest.mark.parametrize("layers", [1, 28, 80])
@pytest.mark.parametrize("limit", [1, 2, 12, 13, 30, 200, 1800, 10**6])
def test_limited_sizes_keep_decode_and_the_largest(layers: int, limit: int) -> None:
    rows, tokens = decode_sizes(64), token_sizes(2048)
    kept_rows, kept_tokens = limited_sizes(rows, tokens, layers + 1, limit)
    graphs = len(kept_rows) + len(kept_tokens) * (layers + 1)
    assert graphs <= limit
    assert set(kept_rows) <= set(rows)
    assert set(kept_tokens) <= set(tokens)
    assert kept_rows[-1] == 64
    assert list(kept_tokens) == sorted(set(kept_tokens))
    assert not kept_tokens or kept_tokens[-1] == 2048
    if limit >= len(rows):
        assert kept_rows == rows
        assert len(kept_tokens) == min(len(tokens), (limit - len(rows)) // (layers + 1))
    if limit == 10**6:
        assert (kept_rows, kept_tokens) == (rows, tokens)
