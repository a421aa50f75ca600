from __future__ import annotations

import pytest

from localllm.app.sizes import size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (24_800_000, "23.7 MiB"),
        (8_040_000_000, "7.5 GiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
