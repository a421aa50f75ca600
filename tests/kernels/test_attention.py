"""Attention of the CPU kernels beyond the cases of the ops: every way to divide the rows, in every ISA variant."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from localllm.kernels.ops import attention as reference
from localllm.kernels.ops.attention import Rows
from localllm.kernels.ops.cases import attention
from localllm.kernels.ops.cases.reference_check import copy_to

cpu = pytest.importorskip("localllm.kernels.cpu", reason="the library is not built", exc_type=ImportError)

from localllm.kernels.cpu.attention.paged import latent_attention, paged_attention  # noqa: E402

pytestmark = pytest.mark.real
LIBRARY = torch.ops.localllm
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {F32: 2e-5, BF16: 1e-2, F16: 2e-3}

# One token over one piece of keys, over many, over as many as there may be; several tokens over one piece, over two;
# several blocks of tokens.
MIXED = [(1, 1), (1, 300), (1, 4500), (3, 40), (20, 1100), (150, 400), (1, 33)]


@pytest.fixture(params=LIBRARY.variants().split(), autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[str]:
    threads, few = LIBRARY.threads(), LIBRARY.share_from(0)
    yield LIBRARY.use_variant(request.param)
    LIBRARY.share_from(few)
    LIBRARY.use_threads(threads)
    LIBRARY.use_variant(os.environ.get("LOCALLLM_CPU_LANE", ""))


def step(
    lens: list[tuple[int, int]],  # of each row: queries, context
    dtype: torch.dtype,
    cache: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    page_size: int = 16,
    **options: Any,
) -> dict[str, Any]:
    made = attention._inputs(lens, heads, kv_heads, dim, page_size, **options)(torch.Generator().manual_seed(3), dtype)
    keys, values = (pages.to(cache or dtype) for pages in made["attend"][:2])
    return {**made, "attend": made["attend"]._replace(key_pages=keys, value_pages=values)}


def latent_step(
    lens: list[tuple[int, int]],  # of each row: queries, context
    dtype: torch.dtype,
    cache: torch.dtype | None = None,
    heads: int = 16,
    rotary: int = 16,
    rank: int = 48,
    page_size: int = 16,
) -> dict[str, Any]:
    made = attention._latents(lens, heads, rotary, rank, page_size)(torch.Generator().manual_seed(3), dtype)
    # A copy, so that AddressSanitizer reports reads behind the last slot.
    return {**made, "pages": tuple(part.to(cache or dtype, copy=True) for part in made["pages"])}


def check(arguments: Mapping[str, Any]) -> None:
    wide = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    is_latent = "pages" in arguments
    expected = (reference.latent_attention if is_latent else reference.paged_attention)(**wide)
    tolerance = TOLERANCES[arguments["query"].dtype] * expected.abs().max().item()
    computed = (latent_attention if is_latent else paged_attention)(
        **arguments, out=torch.full(expected.shape, torch.nan, dtype=arguments["query"].dtype)
    )
    torch.testing.assert_close(computed.double(), expected, rtol=0.0, atol=tolerance)


def test_attention_writes_to_out() -> None:
    paged, latents = step(MIXED, F32), latent_step(MIXED, F32)
    for attend, arguments in (
        (paged_attention, paged),
        (reference.paged_attention, paged),
        (latent_attention, latents),
        (reference.latent_attention, latents),
    ):
        expected = attend(**arguments)
        place = torch.full_like(expected, float("nan"))
        assert attend(**arguments, out=place) is place
        assert torch.equal(place, expected)


@pytest.mark.parametrize("cache", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_attention_supports_unequal_dtypes(dtype: torch.dtype, cache: torch.dtype) -> None:
    check(step(MIXED, dtype, cache))
    check(latent_step(MIXED, dtype, cache))


@pytest.mark.parametrize("dim", [1, 7, 31, 33, 80, 96, 128, 256])
def test_attention_supports_any_head_dim(dim: int) -> None:
    for dtype in (F32, BF16):
        check(step([(1, 70), (9, 40)], dtype, heads=6, dim=dim))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 9, 100])
def test_attention_supports_any_group_size(group: int) -> None:
    for dtype in (F32, BF16):
        check(step([(1, 260), (3, 90), (100, 100)], dtype, heads=group, kv_heads=1, dim=32, page_size=7))


@pytest.mark.parametrize(("rotary", "rank"), [(6, 37), (0, 32), (1, 1), (31, 130), (64, 512)])
def test_latent_attention_supports_any_dims(rotary: int, rank: int) -> None:
    for dtype in (F32, BF16):
        check(latent_step([(1, 260), (9, 40), (40, 40)], dtype, rotary=rotary, rank=rank, page_size=7))


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 9, 15, 40, 128])
def test_latent_attention_supports_any_number_of_heads(heads: int) -> None:
    for dtype in (F32, BF16):
        check(latent_step([(1, 260), (3, 90), (100, 100), (1, 1)], dtype, heads=heads))
        check(latent_step([(1, 256)], dtype, heads=heads))  # every slot of the last page


@pytest.mark.parametrize("window", [1, 2, 32, 65, 1025])
def test_attention_with_windows(window: int) -> None:
    check(step(MIXED, F32, window=window))
    check(step(MIXED, F32, window=window, soft_cap=3.0, sinks=torch.tensor([0.5, -2.0, 40.0, 1.0])))


@pytest.mark.parametrize("tokens", [1, 4, 5, 31, 32, 33, 257])
def test_attention_supports_any_number_of_tokens(tokens: int) -> None:
    for dtype in (F32, BF16):
        check(step([(tokens, tokens + 3)], dtype))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("attend", [paged_attention, latent_attention])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    attend: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    arguments = (step if attend is paged_attention else latent_step)(MIXED, dtype)
    rows, query = arguments["rows"], arguments["query"]
    LIBRARY.use_threads(3)
    together = attend(**arguments)
    LIBRARY.use_threads(1)
    assert torch.equal(together, attend(**arguments))
    start = 0
    for row, (queries, context) in enumerate(MIXED):
        own = slice(start, start := start + queries)
        only = Rows(
            torch.tensor([0, queries], dtype=torch.int32),
            rows.context_lens[row : row + 1],
            rows.page_table[row : row + 1],
            (queries,),
            (context,),
        )
        alone = attend(**{**arguments, "query": query[own], "rows": only})
        assert torch.equal(together[own], alone)


def test_attention_reads_queries_from_a_qkv_projection() -> None:
    arguments = step(MIXED, F32)
    query = arguments["query"]
    product = torch.full((len(query), 9, 64), torch.nan)
    product[:, 2:6] = query
    assert torch.equal(paged_attention(**{**arguments, "query": product[:, 2:6]}), paged_attention(**arguments))


def test_latent_attention_reads_queries_with_gaps() -> None:
    arguments = latent_step(MIXED, F32)
    query = arguments["query"]
    heads = torch.full((len(query), 17, 64), torch.nan)  # queries and key, as the projection returns them
    heads[:, :16] = query
    expected = latent_attention(**arguments)
    assert torch.equal(latent_attention(**{**arguments, "query": heads[:, :16]}), expected)
    part = torch.full((len(query), 16, 70), torch.nan)[:, :, 3:67]
    part.copy_(query)
    assert torch.equal(latent_attention(**{**arguments, "query": part}), expected)


def test_rotated_keys_and_latents_may_lie_apart() -> None:
    arguments = latent_step(MIXED, F32)
    (keys,) = arguments["pages"]
    expected = reference.latent_attention(**arguments)
    apart = {**arguments, "pages": (keys[..., :16].contiguous(), keys[..., 16:].contiguous())}
    for attend in (latent_attention, reference.latent_attention):
        assert torch.equal(attend(**apart), expected)


@pytest.mark.parametrize("token", [0, 4])
def test_a_nan_query_affects_only_its_own_output(token: int) -> None:
    for attend, arguments in (
        (paged_attention, step([(1, 40), (9, 40)], F32)),
        (latent_attention, latent_step([(1, 40), (9, 40)], F32, rank=64)),
    ):
        arguments["query"][token, 1, 5] = torch.nan
        spoilt = attend(**arguments).isnan()
        assert spoilt[token, 1].all()
        assert spoilt.sum() == 64


def test_attention_with_scores_of_very_different_size() -> None:
    arguments = step([(1, 200), (9, 40)], F32)
    check({**arguments, "query": arguments["query"] * 1e4})
    sinks = torch.tensor([1e9, -1e9, 100.0, 0.0])
    check({**arguments, "attend": arguments["attend"]._replace(sinks=sinks)})
    latents = latent_step([(1, 200), (9, 40)], F32)
    check({**latents, "query": latents["query"] * 1e4})
