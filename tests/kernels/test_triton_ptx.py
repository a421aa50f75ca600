"""Runs the PTX instructions with which Triton kernels dequantise, for every byte and every zero point."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("triton")

from localllm.kernels.triton.nvidia import assembly

pytestmark = pytest.mark.emulated
KINDS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def pair(register: int, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit floats in a register."""
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def register(values: torch.Tensor) -> int:
    low, high = (int(bits) & 0xFFFF for bits in values.view(torch.int16))
    return low | high << 16


def execute(code: str, given: Mapping[str, int]) -> dict[str, int]:
    """The registers after the code. Every register must be written before it is read."""
    held = dict(given)

    def value(name: str) -> int:
        return int(name, 0) if re.match(r"0x|\d", name) else held[name]

    for line in code.strip("{}\n").splitlines():
        if line.startswith(".reg"):
            continue
        op, to, *names = re.fullmatch(r"(\S+) (.*);", line).expand(r"\1,\2").replace(" ", "").split(",")  # type: ignore[union-attr]
        numbers = [value(name) for name in names]
        match op.split("."):
            case ["mov", _]:
                held[to] = numbers[0]
            case ["and", _]:
                held[to] = numbers[0] & numbers[1]
            case ["shr", "u32"]:
                held[to] = numbers[0] >> numbers[1]
            case ["prmt", _]:
                data = (numbers[0] | numbers[1] << 32).to_bytes(8, "little")
                held[to] = int.from_bytes(bytes(data[numbers[2] >> 4 * i & 7] for i in range(4)), "little")
            case ["lop3", _]:
                assert numbers[3] == 0xEA, "(a & b) | c"
                held[to] = numbers[0] & numbers[1] | numbers[2]
            case ["fma", "rn", kind]:
                a, b, c = (pair(number, KINDS[kind]).double() for number in numbers)
                held[to] = register((a * b + c).to(KINDS[kind]))
            case _:
                pytest.fail(f"unknown: {line}")
    return held


@pytest.mark.parametrize("dtype", KINDS.values(), ids=str)
def test_nibbles_less_their_zero_point(dtype: torch.dtype) -> None:
    code, base = (assembly.NIBBLES_BF16, 128) if dtype == torch.bfloat16 else (assembly.NIBBLES_FP16, 1024)
    for first in range(0, 256, 4):
        data = [first, first + 1, 255 - first, (first * 37 + 11) % 256]
        for zero in range(17):
            shift = register(torch.full((2,), -base - zero).to(dtype))
            given = {"$4": int.from_bytes(bytes(data), "little"), "$5": shift, "$6": shift}
            found = execute(code.value, given)
            low = torch.cat([pair(found["$0"], dtype), pair(found["$1"], dtype)])
            high = torch.cat([pair(found["$2"], dtype), pair(found["$3"], dtype)])
            assert low.tolist() == [(byte & 15) - zero for byte in data]
            assert high.tolist() == [(byte >> 4) - zero for byte in data]


@pytest.mark.parametrize("dtype", KINDS.values(), ids=str)
def test_every_e4m3(dtype: torch.dtype) -> None:
    code = assembly.E4M3_BF16 if dtype == torch.bfloat16 else assembly.E4M3_FP16
    for first in range(0, 256, 4):
        data = torch.arange(first, first + 4, dtype=torch.uint8)
        found = execute(code.value, {"$2": int.from_bytes(bytes(data.tolist()), "little")})
        values = torch.cat([pair(found["$0"], dtype), pair(found["$1"], dtype)])
        right = data.view(torch.float8_e4m3fn).to(dtype)
        known = ~right.isnan()  # weights have no NaN
        assert torch.equal(values[known].view(torch.int16), right[known].view(torch.int16))
