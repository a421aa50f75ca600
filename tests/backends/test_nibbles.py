"""4-bit numbers in the layouts of checkpoints: orders, odd widths, scales in float16 and beyond it, sorted groups."""

from __future__ import annotations

import pytest
import torch

from localllm.backends.pytorch.quant.nibbles import grouped, half_scales, paired, sorted_inputs, unpacked
from localllm.engine.errors import ModelRefused
from localllm.kernels.ops.linear import Int4


def test_the_lowest_four_bits_are_the_first_column_of_the_order() -> None:
    packed = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # the second is 0xFEDCBA98
    assert unpacked(packed).tolist() == [list(range(16))]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    assert unpacked(packed[:, :1], order).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert unpacked(packed).dtype == torch.uint8


@pytest.mark.parametrize(("row", "pairs"), [([1, 2, 15, 0], [0x21, 0x0F]), ([1, 2, 15], [0x21, 0x0F])])
def test_the_even_input_is_the_low_nibble_and_an_odd_width_ends_in_zero(row: list[int], pairs: list[int]) -> None:
    assert paired(torch.tensor([row], dtype=torch.uint8)).tolist() == [pairs]


def test_scales_near_float16_values_are_accepted() -> None:
    exact = torch.tensor([[0.5, 65504.0, 0.0]])
    assert torch.equal(half_scales("s", exact), exact.half())
    rounded = torch.tensor([[0.1, 1.0]])
    assert half_scales("s", rounded).dtype == torch.float16
    tiny = torch.tensor([[1e-9, 1.0]])  # float16 makes it 0: a millionth of the largest does not matter
    assert half_scales("s", tiny).tolist() == [[0.0, 1.0]]
    short = torch.tensor([[2.0**-18 + 2.0**-25]])  # of bfloat16, whose last bit float16 has no room for so near to 0
    assert half_scales("s", short).tolist() == [[2.0**-18]]
    assert half_scales("s", torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
    assert half_scales("s", torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("scales", [[1.0, 65536.0], [3e-8 * 1.4, 3e-8], [1e-9, 1e-9]], ids=str)
def test_scales_beyond_float16_are_refused_by_name(scales: list[float]) -> None:
    with pytest.raises(ModelRefused, match=rf"'a.scales' has scales beyond float16: up to {max(scales):g}"):
        half_scales("a.scales", torch.tensor([scales]))


def test_contiguous_groups_need_no_order() -> None:
    assert grouped("g", torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32), 2) is None


def test_inputs_are_sorted_by_their_groups() -> None:
    order = grouped("g", torch.tensor([1, 0, 2, 0, 1], dtype=torch.int32), 2)
    assert order is not None
    assert order.tolist() == [1, 3, 0, 4, 2]
    nibbles = torch.tensor([[3, 5, 7, 9, 11], [1, 2, 4, 6, 8]], dtype=torch.uint8)
    weight = Int4(paired(nibbles), torch.ones(2, 3).half(), torch.zeros(2, 3, dtype=torch.uint8), 2, 5)
    permuted = sorted_inputs(weight, order)
    assert permuted.dense().tolist() == weight.dense()[:, order].tolist()
    assert permuted._replace(data=weight.data) == weight


@pytest.mark.parametrize("groups", [[0, 0, 0, 1], [0, 1, 1, 1, 2], [1, 1, 2, 2]], ids=str)
def test_groups_with_a_wrong_size_are_refused(groups: list[int]) -> None:
    with pytest.raises(ModelRefused, match=r"'g' does not assign the inputs to groups of 2, contrary to config\.json"):
        grouped("g", torch.tensor(groups), 2)
