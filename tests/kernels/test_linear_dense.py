"""Products with float weights in every ISA variant of this machine: equal bits in any batch, the packed layout,
strides, odd shapes at the edge of readable memory, NaN and infinity."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu import device as cpu

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")]

LANES = [] if cpu.MISSING else [lane for lane in torch.ops.localllm.variants().split() if lane != "amx"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
PANEL = 32


@pytest.fixture(params=LANES, autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[str]:
    """Outputs are full of NaN before they are written."""
    before = torch.ops.localllm.threads()
    torch.ops.localllm.use_variant(request.param)
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)
    torch.ops.localllm.use_threads(before)
    torch.ops.localllm.use_variant("")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return cpu.OPS.linear.dense(x, cpu.OPS.linear.pack(weight, x.dtype), dtype=dtype)


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_batch(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Rows alone, in batches of any size, and divided among any number of threads."""
    x, weight = numbers(257, 1030, dtype=dtype), numbers(97, 1030, seed=1, dtype=stored)
    torch.ops.localllm.use_threads(1)
    expected = product(x, weight)
    for rows, workers in [(1, 1), (1, 3), (2, 2), (3, 1), (5, 3), (7, 5), (16, 2), (33, 3), (100, 1), (257, 3)]:
        torch.ops.localllm.use_threads(workers)
        for first in (0, 257 - rows):
            assert torch.equal(product(x[first : first + rows], weight), expected[first : first + rows])


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (32, 32), (33, 31), (70, 65)])
def test_packed_weights_have_the_documented_layout(stored: torch.dtype, out_features: int, in_features: int) -> None:
    weight = numbers(out_features, in_features, dtype=stored)
    packed = cpu.OPS.linear.pack(weight, stored).data.view(stored)
    panels = -(-out_features // PANEL)
    if stored == torch.float32:  # [panel][in_features][32]
        found = packed.view(panels, -1, PANEL).transpose(1, 2)
    else:  # [panel][in_features / 2][32][2]
        found = packed.view(panels, -1, PANEL, 2).transpose(1, 2).flatten(2)
    found = found.reshape(panels * PANEL, -1)
    assert torch.equal(found[:out_features, :in_features], weight)
    assert not found[out_features:].any()
    assert not found[:, in_features:].any()


@pytest.mark.parametrize("stored", TYPES)
def test_strided_rows_are_read_and_written_in_place(stored: torch.dtype) -> None:
    whole, weight = numbers(40, 90), numbers(45, 61, seed=1, dtype=stored)
    out = torch.full((40, 60), 7.0)
    packed = cpu.OPS.linear.pack(weight, torch.float32)
    x, found = whole[:, 13:74], out[:, 9:54]
    torch.ops.localllm.linear(found, x, packed.data, None, packed.format, packed.in_features, packed.group, False)
    torch.testing.assert_close(found, x @ weight.float().T, rtol=0.0, atol=1e-4)
    assert (out[:, :9] == 7.0).all()
    assert (out[:, 54:] == 7.0).all()


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_nothing_is_read_after_the_last_input(stored: torch.dtype, dtype: torch.dtype, rows: int) -> None:
    """x ends at the end of readable memory. A read beyond it would kill the process."""
    weight = numbers(33, 37, seed=1, dtype=stored)
    given = numbers(rows, 37, dtype=dtype)
    size = given.nbytes
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    after = ctypes.c_void_p(address + mmap.PAGESIZE)
    assert libc.mprotect(after, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    x = torch.frombuffer(memory, dtype=torch.uint8, count=mmap.PAGESIZE)[-size:].view(dtype).view(rows, 37)
    x.copy_(given)
    torch.testing.assert_close(product(x, weight), product(given, weight), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    x, weight = numbers(9, 64, dtype=dtype), numbers(40, 64, seed=1, dtype=dtype).abs() + 1
    expected = product(x, weight)
    x[3, 5], x[6, 63] = float("nan"), float("inf")
    found = product(x, weight)
    assert found[3].isnan().all()
    assert (found[6] == float("inf")).all()
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(found[others], expected[others])


def test_float16_overflow_becomes_infinite() -> None:
    x, weight = torch.full((3, 8), 100.0), torch.full((33, 8), 100.0)
    assert product(x, weight, torch.float16).isinf().all()
    assert (product(x, weight, torch.bfloat16) == 79872.0).all()


def test_large_weights_are_aligned_to_a_huge_page() -> None:
    packed = cpu.OPS.linear.pack(numbers(1056, 1024, dtype=torch.bfloat16), torch.bfloat16).data
    assert packed.nbytes > 2**21
    assert packed.data_ptr() % 2**21 == 0
