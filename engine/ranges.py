"""The ranges of the sampling parameters: one table for the engine, the API and the terminal UI."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`; without `low` itself if `excludes_low` is true."""

    low: float
    high: float
    kind: type[int] | type[float] = float
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        if value == self.low:
            return not self.excludes_low
        return self.low < value <= self.high

    def __str__(self) -> str:
        number = "an integer" if self.kind is int else "a number"
        if self.excludes_low:
            return f"{number} above {self.low:g} and up to {_text(self.high)}"
        return f"{number} from {self.low:g} to {_text(self.high)}"


RANGES = {
    "temperature": Range(0, 2),
    "top_k": Range(0, 2**31 - 1, int),
    "top_p": Range(0, 1, excludes_low=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, excludes_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logit_bias": Range(-100, 100),
    "adapter_scale": Range(-100, 100),
    "logprobs": Range(0, 20, int),
    "min_tokens": Range(0, 2**31 - 1, int),
    "max_tokens": Range(1, 2**53 - 1, int),  # 2^53 - 1: the largest integer that every JSON parser keeps
    "seed": Range(0, 2**64 - 1, int),
}


HOT = Range(0, 100)  # the temperatures of the engine: tests and files of models have hotter ones than clients


def check_range(name: str, value: float) -> None:
    """Raises ValueError, with parameter, range and value, if the value is outside the range of the parameter."""
    if value not in RANGES[name]:
        raise ValueError(f"{name} must be {RANGES[name]}, not {value}")


def _text(limit: float) -> str:
    """The text of a limit. An integer of many digits is written as a power of two."""
    return f"2^{int(limit).bit_length()} - 1" if limit >= 2**31 - 1 else f"{limit:g}"
