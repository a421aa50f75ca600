from __future__ import annotations

import pytest

from localllm.engine.graphs import bucket


@pytest.mark.parametrize(("size", "found"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_bucket(size: int, found: int | None) -> None:
    assert bucket(size, (1, 2, 4, 8)) == found
