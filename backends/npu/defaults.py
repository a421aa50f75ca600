"""The defaults of an NPU by its memory. The values of the user win."""

from __future__ import annotations

from typing import NamedTuple

PAGE_SIZE = 128  # tokens: attention over pages needs a multiple of 128
# Streams that a device has for captured graphs; each graph takes one, or two with a second stream. CANN's number is
# 2,048 (vllm-ascend plans with 1,800).
MAX_GRAPHS = 1024


class Tier(NamedTuple):
    """NPUs of at most `memory` bytes."""

    memory: float
    step_tokens: int  # maximum number of tokens in a step
    captured_rows: int | None  # rows of the largest captured decode step; None: those of the load options


# SGLang's tiers for one device. A second chip with other limits gets a table of its own.
TIERS = (
    Tier(32 * 2**30, 4096, 16),
    Tier(64 * 2**30, 8192, 64),
    Tier(float("inf"), 8192, None),
)


def tier(memory: int) -> Tier:
    """The defaults of an NPU with `memory` bytes."""
    return next(tier for tier in TIERS if memory <= tier.memory)
