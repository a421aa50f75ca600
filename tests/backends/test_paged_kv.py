"""Copies of pages in all layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.kv import COPY_PAGES, PagedKV


@pytest.mark.parametrize("chained", [False, True], ids=["apart", "chained"])
@pytest.mark.parametrize("count", [0, 1, COPY_PAGES, COPY_PAGES + 1, 3 * COPY_PAGES])
def test_all_sources_are_read_before_a_target_is_written(count: int, chained: bool) -> None:
    kv = PagedKV(3, 2 * count + 1, page_size=4, kv_heads=2, dims=(8, 8), dtype=torch.bfloat16, device="cpu")
    for pages in (kv.keys, kv.values):
        pages.normal_()
    before = torch.stack([kv.keys, kv.values])
    sources = np.arange(1, count + 1)
    targets = sources + (1 if chained else count)
    order = np.random.default_rng(0).permutation(count)
    kv.copy(np.stack([sources, targets], axis=1)[order].astype(np.int32), DEVICE)
    expected = before.clone()
    expected[:, :, targets] = before[:, :, sources]
    assert torch.equal(torch.stack([kv.keys, kv.values]), expected)


def test_scales_of_int8_pages_are_copied_with_them() -> None:
    kv = PagedKV(3, 5, page_size=4, kv_heads=2, dims=(8, 8), dtype=torch.int8, device="cpu")
    assert kv.scales is not None
    kv.keys.random_()
    kv.scales.normal_()
    keys, scales = kv.keys.clone(), kv.scales.clone()
    kv.copy(np.array([[1, 4], [4, 2]], dtype=np.int32), DEVICE)
    assert torch.equal(kv.keys[:, [4, 2]], keys[:, [1, 4]])
    assert torch.equal(kv.scales[:, :, [4, 2]], scales[:, :, [1, 4]])
    assert kv.cache.layer_scales(2).data_ptr() == kv.scales[2].data_ptr()  # type: ignore[union-attr]


def test_cache_has_an_extra_page_for_padding() -> None:
    """Page 0 is for padding and not part of num_pages."""
    kv = PagedKV(3, 5, page_size=4, kv_heads=2, dims=(8, 8), dtype=torch.bfloat16, device="cpu")
    assert kv.keys.shape == kv.values.shape == (3, 6, 4, 2, 8)
    assert kv.keys.untyped_storage().nbytes() == 2 * 3 * 6 * 4 * 2 * 8 * 2
    keys, values = kv.cache.layers[2]
    assert keys.data_ptr() == kv.keys[2].data_ptr()
    assert values.data_ptr() == kv.values[2].data_ptr()
