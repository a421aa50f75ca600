"""The choice of kernels by the wrappers of CUDA C++, on both sides of each limit. The tests need no GPU and no
library: stand-ins of the library's ops record their calls."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from localllm import kernels
from localllm.backends.cuda.ops import _with_library
from localllm.kernels.compiled.library import LibraryMissing, find_library
from localllm.kernels.gpu.properties import GpuProperties
from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Attend, Rows
from localllm.kernels.ops.cases.layer import inputs as layer_inputs
from localllm.kernels.ops.cases.lora import random_adapters, random_weights
from localllm.kernels.ops.cases.moe import random_experts
from localllm.kernels.ops.cases.reference_check import pack_value
from localllm.kernels.ops.kv import Append
from localllm.kernels.ops.linear import Fp8, Int4, Int8, Linear, weight_tensors
from localllm.kernels.ops.mlp import Experts
from localllm.kernels.ops.moe import ExpertWeights, Routed
from localllm.kernels.ops.projection import Product
from localllm.kernels.ops.streams import InOrder

FOLDER = Path(next(iter(kernels.__path__))) / "cuda"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")


class OnGpu(Tensor):
    """A CPU tensor that reports a GPU as its device."""

    is_cuda = True


def gpu(x: Tensor) -> Tensor:
    return x.as_subclass(OnGpu)


@dataclass
class Library:
    """Stand-ins of the library's ops."""

    calls: list[str] = field(default_factory=list)
    fits: Callable[..., bool] = lambda *_: True
    room: int = 0

    def called(self) -> list[str]:
        """The calls since the last call of this function."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture(scope="module")
def loaded() -> Iterator[Library]:
    try:
        file = find_library()
    except LibraryMissing as error:
        pytest.skip(str(error))
    stands_in = Library()
    importlib.import_module("localllm.kernels.cpu")
    ops = torch.library.Library("localllm", "FRAGMENT")
    texts = "\n".join(source.read_text("utf-8") for source in (FOLDER / "binding").glob("*.cpp"))
    schemas = [
        "".join(re.findall(r'"([^"]*)"', one)) for one in re.findall(r'library\.def\(\s*((?:"[^"]*"\s*)+)\)', texts)
    ]
    names = [ops.define(schema) for schema in schemas]

    def noted(name: str) -> Callable[..., Any]:
        def op(*arguments: Any) -> Any:
            if name == "small_batch_fits":
                return stands_in.fits(*arguments)
            if name == "decoder_step_shared_bytes":
                return stands_in.room
            stands_in.calls.append(name)
            return None

        return op

    for name in names:
        ops.impl(name, noted(name), "CompositeExplicitAutograd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CUDA_LIBRARY", str(file))
        yield stands_in
    for name in [name for name in sys.modules if name.startswith("localllm.kernels.cuda")]:
        del sys.modules[name]
    for name in names:
        torch.ops.localllm.__dict__.pop(name, None)
    ops._destroy()


@pytest.fixture
def library(loaded: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    module("products.linear")._fits.cache_clear()
    monkeypatch.setattr(loaded, "fits", lambda *_: True)
    monkeypatch.setattr(module("products.linear"), "gpu_properties", lambda _: GpuProperties((8, 0), 132))
    loaded.called()
    return loaded


def module(name: str) -> ModuleType:
    return importlib.import_module(f"localllm.kernels.cuda.{name}".rstrip("."))


def weight_of(op: str, in_features: int = 256, out_features: int = 48, group: int = 64) -> Any:
    groups = -(-in_features // group)
    if op == "int8":
        return Int8(torch.ones(out_features, in_features, dtype=torch.int8), torch.ones(out_features))
    if op == "fp8":
        return Fp8(
            torch.ones(out_features, in_features).to(torch.float8_e4m3fn), torch.ones(out_features, groups), group
        )
    if op.startswith("int4"):
        data = torch.ones(out_features, -(-in_features // 2), dtype=torch.uint8)
        return Int4(
            data,
            torch.ones(out_features, groups).half(),
            torch.ones(out_features, groups, dtype=torch.uint8),
            group,
            in_features,
        )
    return torch.ones(out_features, in_features, dtype=torch.bfloat16)


class TestProducts:
    @pytest.fixture(autouse=True)
    def _without_triton(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        linear = module("products.linear")
        monkeypatch.setattr(linear, "TRITON", False)  # references answer instead
        monkeypatch.setattr(linear, "TILED_ROWS", dict.fromkeys(linear.TILED_ROWS, 40))
        monkeypatch.setattr(linear, "_float32_sums", lambda x, weights: x.float() @ weights.float().t())

    def calls(self, library: Library, op: str, x: Tensor, weight: Any) -> list[str]:
        linear = module("products.linear")
        packed = linear.pack_slices([weight], 48, torch.bfloat16)
        found = getattr(linear, op)(gpu(x), packed, None, torch.float32)
        assert found.shape == (len(x), 48)
        calls = library.called()
        if not calls:
            expected = getattr(Ops().linear, op)(x, weight, None, torch.float32)
            torch.testing.assert_close(found.as_subclass(Tensor), expected)
        return calls

    @pytest.mark.parametrize("op", ["int8", "int4", "int4_wide", "fp8"])
    def test_number_of_rows(self, library: Library, op: str) -> None:
        linear = module("products.linear")
        least, limit = linear.MIN_TILED_ROWS[getattr(linear, op.upper())], 40
        for rows in (1, least - 1):
            assert self.calls(library, op, torch.ones(rows, 256).bfloat16(), weight_of(op)) == ["small_batch"]
        for rows in (least, least + 1, limit):
            assert self.calls(library, op, torch.ones(rows, 256).bfloat16(), weight_of(op)) == ["tiled_product"]
        many = {"int8": [], "int4": ["round_groups", "widen"]}.get(op, ["widen"])
        assert self.calls(library, op, torch.ones(limit + 1, 256).bfloat16(), weight_of(op)) == many
        assert self.calls(library, op, torch.ones(0, 256).bfloat16(), weight_of(op)) == []

    def test_number_of_rows_on_hopper(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        linear = module("products.linear")
        for major, limits in ((8, linear.TILED_ROWS), (9, linear.HOPPER_TILED_ROWS), (12, linear.TILED_ROWS)):
            monkeypatch.setattr(linear, "gpu_properties", lambda _, major=major: GpuProperties((major, 0), 132))
            for op in ("int8", "int4", "int4_wide", "fp8"):
                weight = linear.pack_slices([weight_of(op, group=256)], 48, torch.bfloat16)
                format = getattr(linear, op.upper())
                assert linear._max_tiled_rows(torch.device("cuda"), weight, format) == limits[format]
        monkeypatch.setattr(linear, "gpu_properties", lambda _: GpuProperties((9, 0), 132))
        grouped = linear.pack_slices([weight_of("fp8", group=64)], 48, torch.bfloat16)
        rows = linear._max_tiled_rows(torch.device("cuda"), grouped, linear.FP8)
        assert rows == linear.HOPPER_GROUPED_FP8_ROWS

    def test_width_of_bf16_products(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        """A GPU with fewer multiprocessors leaves narrower products to torch."""
        linear = module("products.linear")
        shallow = linear.pack_slices([torch.ones(96, 256).bfloat16()], 96, torch.bfloat16)
        for processors, is_faster in ((132, True), (3, True), (2, False)):
            monkeypatch.setattr(linear, "gpu_properties", lambda _, count=processors: GpuProperties((8, 9), count))
            assert linear._beats_torch(4, shallow, torch.bfloat16) == is_faster

    @pytest.mark.parametrize(("rounds", "format"), [(False, 4), (True, 6)])
    def test_tiled_products_of_fp8_may_round_activations(
        self, library: Library, monkeypatch: pytest.MonkeyPatch, rounds: bool, format: int
    ) -> None:
        linear = module("products.linear")
        formats = []
        monkeypatch.setattr(linear, "_tiled_op", lambda *arguments: formats.append(arguments[6]))
        packed = linear.pack_slices([weight_of("fp8", group=256)._replace(rounds=rounds)], 48, torch.bfloat16)
        linear.fp8(gpu(torch.ones(20, 256).bfloat16()), packed)
        assert formats == [format]
        assert packed.plain().rounds == rounds

    def test_fp8_that_rounds_activations_has_its_own_limit(
        self, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        linear = module("products.linear")
        monkeypatch.setattr(linear, "TILED_ROWS", linear.TILED_ROWS | {linear.FP8: 24, linear.FP8_ROUNDED: 30})
        for rounds, rows, is_tiled in ((True, 30, True), (True, 31, False), (False, 24, True), (False, 30, False)):
            weight = weight_of("fp8", group=256)._replace(rounds=rounds)
            called = self.calls(library, "fp8", torch.ones(rows, 256).bfloat16(), weight)
            assert called == (["tiled_product"] if is_tiled else ["widen"])

    def test_small_batches_of_weights_that_are_not_tiled(
        self, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        linear = module("products.linear")
        monkeypatch.setattr(linear, "TILED_ROWS", dict.fromkeys(linear.TILED_ROWS, 0))
        for op in ("int8", "int4", "int4_wide", "fp8"):
            assert self.calls(library, op, torch.ones(16, 256).bfloat16(), weight_of(op)) == ["small_batch"]

    @pytest.mark.parametrize("op", ["dense", "int8", "int4", "int4_wide", "fp8"])
    def test_products_that_do_not_fit_use_other_kernels(
        self, library: Library, op: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[Any, ...]] = []

        def fits(*arguments: Any) -> bool:
            asked.append(arguments)
            return arguments[1] <= 5  # rows

        linear = module("products.linear")
        monkeypatch.setattr(linear, "TILED_ROWS", dict.fromkeys(linear.TILED_ROWS, 0))
        monkeypatch.setattr(library, "fits", fits)
        assert self.calls(library, op, torch.ones(5, 256).bfloat16(), weight_of(op)) == ["small_batch"]
        assert self.calls(library, op, torch.ones(6, 256).bfloat16(), weight_of(op)) == []
        format = {"dense": linear.BF16, "int8": linear.INT8, "fp8": linear.FP8, "int4": linear.INT4}
        bytes = {"dense": 512, "int8": 256, "fp8": 256, "int4": 128, "int4_wide": 128}[op]
        group = 64 if op in ("int4", "int4_wide", "fp8") else 256
        shape = 48, 256, bytes, format.get(op, linear.INT4_WIDE), group, False, False
        assert asked == [(0, 5, *shape), (0, 6, *shape)], "each is asked about once, by its shape"

    @pytest.mark.parametrize("op", ["int8", "int4", "fp8"])
    @pytest.mark.parametrize("rows", [4, 20])
    def test_alignment_of_activations(self, library: Library, op: str, rows: int) -> None:
        linear = module("products.linear")
        kernel = "tiled_product" if rows >= linear.MIN_TILED_ROWS[getattr(linear, op.upper())] else "small_batch"
        other = {"int8": [], "int4": ["round_groups", "widen"], "fp8": ["widen"]}[op] if rows > 16 else []
        wider = torch.ones(rows, 264).bfloat16()
        assert self.calls(library, op, wider[:, :256], weight_of(op)) == [kernel]
        assert self.calls(library, op, wider[:, 1:257], weight_of(op)) == other
        assert self.calls(library, op, torch.ones(rows, 260).bfloat16()[:, :256], weight_of(op)) == other
        assert self.calls(library, op, torch.ones(256, rows).bfloat16().t(), weight_of(op)) == other
        assert self.calls(library, op, torch.ones(rows, 252).bfloat16(), weight_of(op, 252)) == []
        assert self.calls(library, op, torch.ones(rows, 256), weight_of(op)) == []

    def test_many_rows_are_multiplied_in_chunks(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        """Chunks begin at multiples of 64 outputs; the last one is shorter."""
        linear, starts = module("products.linear"), []

        def widen(out: Tensor, weight: Tensor, records: Tensor, *rest: Any) -> None:
            starts.append((rest[-1], len(out)))
            out.fill_(len(starts))

        monkeypatch.setattr(linear, "_widen_op", widen)
        monkeypatch.setattr("localllm.kernels.gpu.widened_product.MAX_CHUNK", 70 * 256)
        packed = linear.pack_slices([weight_of("int4_wide", 256, 200)], 200, torch.bfloat16)
        x = gpu(torch.ones(41, 256).bfloat16())
        found = linear.int4_wide(x, packed, None, torch.bfloat16)
        assert starts == [(0, 64), (64, 64), (128, 64), (192, 8)]
        assert found[0].tolist() == [256.0] * 64 + [512.0] * 64 + [768.0] * 64 + [1024.0] * 8
        bias = torch.arange(200.0)
        again = linear.int4_wide(x, packed, bias, torch.float32)
        assert (again[0] - bias).tolist() == [1280.0] * 64 + [1536.0] * 64 + [1792.0] * 64 + [2048.0] * 8

    def test_groups_of_fp8(self, library: Library) -> None:
        for group, calls in ((64, ["small_batch"]), (128, ["small_batch"]), (256, ["small_batch"]), (32, []), (96, [])):
            assert self.calls(library, "fp8", torch.ones(2, 256).bfloat16(), weight_of("fp8", group=group)) == calls


class TestLayer:
    def decode(self, library: Library, rows: int = 2, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> list[str]:
        """The calls of a layer in which only the products are the library's."""
        linear = module("products.linear")
        ops = Ops()
        given = dict(
            layer_inputs([(1, 4)] * rows, **{"hidden": 128, "inner": 64, "dim": 32, **shape})(torch.Generator(), dtype)
        )
        products = Ops(linear=type(ops.linear)(dense=linear.dense, pack_slices=linear.pack_slices))
        given |= {"layer": pack_value(products, given["layer"], dtype), "ops": products}
        given |= {name: gpu(given[name]) for name in ("x", "stream")}
        module("step.layer").decoder(**given)
        return library.called()

    def test_norms_are_fused_if_they_fit(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.decode(library)[:1] == ["small_batch"]
        normed: list[bool] = []

        def fits(*arguments: Any) -> bool:
            normed.append(arguments[-1])
            return not arguments[-1]

        monkeypatch.setattr(library, "fits", fits)
        module("products.linear")._fits.cache_clear()
        self.decode(library)
        assert True in normed
        assert False in normed, "the layer is computed part by part"

    @pytest.mark.parametrize(
        ("op", "rows", "is_fused"),
        [("int4", 1, True), ("int4", 2, False), ("int4_wide", 1, True), ("int4_wide", 2, False), ("fp8", 2, True),
         ("fp8", 3, False)],
    )  # fmt: skip
    def test_norms_are_fused_in_the_format_of_the_product(
        self, op: str, rows: int, is_fused: bool, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer, linear = module("step.layer"), module("products.linear")
        formats: list[int] = []
        asked: list[tuple[Any, ...]] = []

        def small_batch(*arguments: Any) -> None:
            formats.append(arguments[6])

        def fits(*arguments: Any) -> bool:
            asked.append(arguments)
            return True

        monkeypatch.setattr(linear, "_small_batch_op", small_batch)
        monkeypatch.setattr(library, "fits", fits)
        product = Product(op, linear.pack_slices([weight_of(op)], 48, torch.bfloat16), None)
        assert (layer._fused(product, rows) is not None) == is_fused
        if not is_fused:
            return
        format = getattr(linear, op.upper())
        assert [(one[5], one[-1]) for one in asked] == [(format, True)]
        x, stream = (torch.ones(rows, 256).bfloat16() for _ in range(2))
        layer._normalised(x, stream, (torch.ones(256).bfloat16(), 1e-6, 0.0), product)
        assert formats == [format]

    @pytest.mark.parametrize("shape", [{"rows": 9}, {"hidden": 124}, {"dtype": torch.float32}])
    def test_other_layers_are_composed(self, library: Library, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module("step.layer"), "_normalised", lambda *_: pytest.fail("fused"))
        self.decode(library, **shape)

    @pytest.mark.parametrize("shape", [{}, {"after_norms": True, "offset": 1.0}], ids=["plain", "norms"])
    @pytest.mark.parametrize("has_router", [True, False], ids=["fused-router", "composed-router"])
    @pytest.mark.parametrize("after_router", [False, True])
    def test_layers_with_experts_equal_the_reference(
        self, after_router: bool, has_router: bool, shape: Any, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """References compute what the kernels fuse, so all bits are equal. A fork follows a fused router."""
        layer, ops = module("step.layer"), Ops()
        make = layer_inputs([(1, 4), (1, 7)], hidden=128, inner=64, experts=6, **shape)
        given, same = (dict(make(torch.Generator().manual_seed(2), torch.bfloat16)) for _ in range(2))
        forked: list[str] = []

        def normalised(x: Tensor, stream: Tensor, norm: Any, product: Product) -> tuple[Tensor, Tensor]:
            x, stream = ops.norm.add_rms(x, stream, *norm)
            return product(x, ops), stream

        def norm_route(x: Tensor, stream: Tensor, norm: Any, experts: Experts) -> Any:
            forked.append("router")
            if not has_router:
                return None
            x, stream = ops.norm.add_rms(x, stream, *norm)
            return x, stream, ops.moe.route(experts.router(x, ops, None, torch.float32), experts.routing)

        class Noted(InOrder):
            def fork(self) -> Any:
                forked.append("fork")
                return super().fork()

        streams = Noted()
        streams.after_router = after_router
        monkeypatch.setattr(layer, "_fused", lambda projection, *_, **__: projection.product)
        monkeypatch.setattr(layer, "_normalised", normalised)
        monkeypatch.setattr(layer, "norm_route", norm_route)
        given |= {name: gpu(given[name]) for name in ("x", "stream")}
        actual = layer.decoder(**given | {"step": given["step"]._replace(streams=streams)})
        for one, other in zip(actual, ops.layer.decoder(**same), strict=True):
            assert torch.equal(one.as_subclass(Tensor), other)
        assert forked == ["router", "fork"]

    def test_steps_with_adapters_have_no_fused_router(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module("step.layer"), "_attention", lambda *_: pytest.fail("fused"))
        self.decode(library, experts=6, adapted=True)


class TestExperts:
    """The CUDA C++ kernels of experts, for steps of few tokens."""

    @pytest.mark.parametrize(
        ("changed", "is_supported"),
        [
            *(({"op": op}, True) for op in ("int8", "int4", "int4_wide", "fp8", "mxfp4")),
            ({"op": "dense"}, False),
            ({"op": "int4", "group": 128}, True),
            ({"op": "int4_wide", "group": 96}, False),
            ({"op": "fp8", "group": 128}, True),
            ({"op": "fp8", "group": 192}, False),
            ({"op": "fp8", "group": 16384}, True),
            ({"op": "mxfp4", "hidden": 16416}, False),
            ({"op": "mxfp4", "dtype": torch.float32}, False),
            ({"tokens": 0}, False),
            ({"hidden": 16392}, False),
            ({"hidden": 260}, False),
            ({"inner": 36}, False),
            ({"gate": "clamped_swiglu_and_mul"}, True),
            ({"dtype": torch.float16}, False),
        ],
        ids=str,
    )
    def test_supported_experts(self, changed: dict[str, Any], is_supported: bool, library: Library) -> None:
        given = {"op": "int8", "tokens": 2, "hidden": 512, "inner": 64, "group": 64, "gate": "silu_and_mul"} | changed
        dtype = given.pop("dtype", torch.bfloat16)
        assert self.is_supported(dtype=dtype, **given) == is_supported

    @pytest.mark.parametrize("op", ["int8", "int4", "int4_wide", "fp8", "mxfp4"])
    def test_number_of_choices(self, op: str, library: Library) -> None:
        most = module("moe.experts").FEW[op] // 2  # each token has two choices
        assert self.is_supported(op, most)
        assert not self.is_supported(op, most + 1)

    def test_rows_that_are_not_aligned_are_copied(self, library: Library) -> None:
        with_vectors = module("products.linear").with_vectors
        held = torch.arange(134.0).bfloat16()
        aligned = held[:128].view(2, 64)
        assert with_vectors(aligned) is aligned
        for x in (held.view(2, 67)[:1, :64], held.view(2, 67)[:, :64], held[4:132].view(2, 64), aligned.t()):
            copy = with_vectors(x)
            assert torch.equal(copy, x)
            assert copy.stride() == (x.shape[1], 1)
            assert copy.data_ptr() % 16 == 0

    def is_supported(
        self, op: str, tokens: int, hidden: int = 64, inner: int = 32, group: int = 64,
        gate: Any = "silu_and_mul", dtype: torch.dtype = torch.bfloat16,
    ) -> bool:  # fmt: skip
        weights = self.packed(random_experts(op, 3, hidden, inner, torch.Generator(), dtype, gate=gate, group=group))
        routed = Routed(torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 2))
        supported: bool = module("moe.experts").supports_few(torch.zeros(tokens, hidden, dtype=dtype), routed, weights)
        return supported

    def packed(self, weights: ExpertWeights) -> ExpertWeights:
        pack = module("moe.experts").pack_slices
        outputs = 2 * weights.inner, len(next(iter(weight_tensors(weights.down)))) // 3
        gate_up, down = (
            pack([weight], 3, each, torch.bfloat16)
            for weight, each in zip((weights.gate_up, weights.down), outputs, strict=True)
        )
        return weights._replace(gate_up=gate_up, down=down)

    @pytest.mark.parametrize(("op", "gate"), [("int8", "silu_and_mul"), ("mxfp4", "clamped_swiglu_and_mul")])
    def test_experts_of_few_choices(
        self, op: str, gate: Any, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both products are one call of the library each."""
        pytest.importorskip("triton")
        moe = module("moe.experts")
        monkeypatch.setattr(moe, "TRITON", True)
        monkeypatch.setattr("localllm.kernels.triton.moe_product.combine", lambda results, *_: results[:1])
        monkeypatch.setattr(
            "localllm.kernels.triton.target.device_properties", lambda _: Mock(target=Mock(overlaps=False))
        )
        weights = self.packed(random_experts(op, 3, 64, 32, torch.Generator(), torch.bfloat16, gate=gate, bias=True))
        routed = Routed(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2))
        assert moe.experts(gpu(torch.zeros(1, 64).bfloat16()), routed, weights).shape == (1, 64)
        assert library.called() == ["choice_products"] * 2


class TestAttention:
    @pytest.fixture(autouse=True)
    def _others(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = module("attention.paged")
        monkeypatch.setattr(module("attention.prefill_mma"), "TRITON", True)
        self.on(monkeypatch, (9, 0))
        monkeypatch.setattr(attention, "fallback", lambda *_: library.calls.append("fallback"))

    def on(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        """Simulates a GPU of this compute capability."""
        processors = 132 if capability == (9, 0) else 0
        monkeypatch.setattr(module("attention.prefill"), "_processors", lambda device: processors)
        mma = module("attention.prefill_mma")
        monkeypatch.setattr(mma, "gpu_properties", lambda device: GpuProperties(capability, 132))

    def calls(
        self,
        library: Library,
        lens: list[tuple[int, int]],
        heads: int = 8,
        kv_heads: int = 2,
        dim: int = 64,
        size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        cache: torch.dtype | None = None,
        apart: int = 0,
        shifted: int = 0,
    ) -> list[str]:
        queries, contexts = (tuple(one[at] for one in lens) for at in (0, 1))
        table = torch.zeros(len(lens), 1, dtype=torch.int32)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        rows = Rows(starts, torch.tensor(contexts).int(), table, queries, contexts)
        pages = torch.zeros(2, 3, size, kv_heads, dim).to(cache or dtype)
        whole = torch.zeros(sum(queries) * heads * (dim + apart) + shifted, dtype=dtype)[shifted:]
        query = whole.view(sum(queries), heads, dim + apart)[..., :dim]
        module("attention.paged").paged_attention(query, rows, Attend(pages[0], pages[1], 1.0))
        return library.called()

    DECODE, PROMPT = [(1, 5), (1, 9)], [(60, 60)]

    def test_values_within_the_limit_are_supported(self, library: Library) -> None:
        assert self.calls(library, self.DECODE) == ["decode_attention"]
        assert self.calls(library, self.PROMPT) == ["prefill_attention"]
        assert self.calls(library, [*self.DECODE, *self.PROMPT]) == ["prefill_attention", "decode_attention"]
        assert self.calls(library, self.DECODE, apart=8) == ["decode_attention"]
        assert self.calls(library, self.DECODE, heads=16) == ["decode_attention"], "8 heads share"
        assert self.calls(library, self.PROMPT, heads=256) == ["prefill_attention"], "128 heads share"

    @pytest.mark.parametrize("dim", [80, 96, 192, 256])
    @pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=str)
    def test_other_head_sizes_use_mma(self, library: Library, dim: int, cache: torch.dtype | None) -> None:
        shape: dict[str, Any] = {"dim": dim, "cache": cache}
        assert self.calls(library, self.DECODE, **shape) == ["decode_attention"]
        assert self.calls(library, self.PROMPT, **shape) == ["prefill_attention_mma"]
        mixed = [*self.DECODE, *self.PROMPT]
        assert self.calls(library, mixed, **shape) == ["prefill_attention_mma", "decode_attention"]

    @pytest.mark.parametrize("shape", [{"cache": torch.float8_e4m3fn}, {"size": 1}, {"size": 4}], ids=str)
    @pytest.mark.parametrize("dim", [64, 128])
    def test_triton_with_wgmma_is_faster_than_mma(
        self, library: Library, dim: int, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.calls(library, self.PROMPT, dim=dim, **shape) == ["fallback"]
        monkeypatch.setattr(module("attention.prefill_mma"), "TRITON", False)
        assert self.calls(library, self.PROMPT, dim=dim, **shape) == ["prefill_attention_mma"]

    @pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)], ids=str)
    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=str)
    def test_gpus_without_wgmma_use_mma(
        self,
        library: Library,
        capability: tuple[int, int],
        dim: int,
        cache: torch.dtype | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.on(monkeypatch, capability)
        assert self.calls(library, self.PROMPT, dim=dim, cache=cache) == ["prefill_attention_mma"]

    @pytest.mark.parametrize("capability", [(10, 0), (11, 0)], ids=str)
    def test_gpus_with_tcgen05_use_triton(
        self, library: Library, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.on(monkeypatch, capability)
        assert self.calls(library, self.PROMPT, dim=128) == ["fallback"]
        assert self.calls(library, self.DECODE, dim=128) == ["decode_attention"]

    @pytest.mark.parametrize("lens", [[(4, 60)], [(40, 4000)]], ids=["short", "few tiles"])
    def test_rows_that_occupy_few_multiprocessors(
        self, library: Library, lens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.calls(library, lens, dim=96) == ["fallback"]
        monkeypatch.setattr(module("attention.prefill_mma"), "TRITON", False)
        assert self.calls(library, lens, dim=96) == ["prefill_attention_mma"], "the reference is slower"

    def test_without_triton_mma_computes_what_decode_does_not_support(
        self, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module("attention.prefill_mma"), "TRITON", False)
        assert self.calls(library, self.DECODE, heads=18) == ["prefill_attention_mma"]
        assert self.calls(library, self.DECODE) == ["decode_attention"]

    @pytest.mark.parametrize(
        "beyond",
        [
            {"dim": 32}, {"dim": 63}, {"dim": 65}, {"dim": 112}, {"dim": 127}, {"dim": 129}, {"dim": 512},
            {"dtype": torch.float32}, {"size": 12}, {"apart": 4}, {"shifted": 4}, {"cache": torch.float16},
        ],
        ids=str,
    )  # fmt: skip
    def test_values_beyond_the_limit_use_other_kernels(self, library: Library, beyond: dict[str, Any]) -> None:
        assert self.calls(library, self.DECODE, **beyond) == ["fallback"]
        assert self.calls(library, self.PROMPT, **beyond) == ["fallback"]

    def test_groups_larger_than_the_kernel_supports(self, library: Library) -> None:
        assert self.calls(library, self.DECODE, heads=18) == ["fallback"]
        assert self.calls(library, self.PROMPT, heads=258) == ["fallback"]

    def test_more_rows_than_counters(self, library: Library) -> None:
        assert self.calls(library, [(1, 1)] * 32768) == ["decode_attention"]
        assert self.calls(library, [(1, 1)] * 32769) == ["fallback"]


class TestAppend:
    @pytest.fixture(autouse=True)
    def _others(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module("layers.kv").compiled, "append", lambda *_: library.calls.append("append"))
        monkeypatch.setattr(module("layers.kv"), "_composed", lambda *_: library.calls.append("parts"))

    def calls(
        self,
        library: Library,
        dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        cache: torch.dtype = torch.bfloat16,
        norms: tuple[torch.dtype, torch.dtype] | None = None,
        apart: int = 0,
    ) -> list[str]:
        qkv = torch.zeros(3, 4, dim + apart, dtype=dtype)[..., :dim]
        pages, angle = torch.zeros(2, 4, 8, 1, dim).to(cache), torch.zeros(3, dim // 2)
        weights = [None, None] if norms is None else [torch.ones(dim, dtype=one) for one in norms]
        module("layers.kv").append(qkv, angle, angle, torch.arange(3), Append(*pages, "neox", *weights))
        return library.called()

    def test_values_within_the_limit_are_supported(self, library: Library) -> None:
        for dim in (2, 37, 256, 264, 512, 12288):
            assert self.calls(library, dim) == ["append"]
        for cache, norm in ((torch.bfloat16, torch.float16), (torch.float8_e4m3fn, torch.float32)):
            assert self.calls(library, cache=cache, norms=(norm, norm)) == ["append"]

    @pytest.mark.parametrize(
        "beyond",
        [
            {"dim": 12290}, {"dtype": torch.float64}, {"cache": torch.float16}, {"apart": 8},
            {"norms": (torch.float32, torch.bfloat16)},
        ],
        ids=str,
    )  # fmt: skip
    def test_values_beyond_the_limit_use_other_kernels(self, library: Library, beyond: dict[str, Any]) -> None:
        assert self.calls(library, **beyond) == ["parts"]


class TestLora:
    """The library's ops that a step with adapters calls. Each op starts one kernel."""

    def calls(
        self,
        library: Library,
        slots: list[int],
        *,
        rank: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
        bias: bool = False,
        op: str = "project",
    ) -> list[str]:
        generator = torch.Generator().manual_seed(0)
        adapters = random_adapters([(1, slot) for slot in slots], generator)
        weights = random_weights((0, *[rank] * max(slots)), 2048, (32, 16), generator, dtype)
        x = gpu(torch.ones(len(slots), 2048, dtype=dtype))
        if op == "add":
            module("lora.products").add(gpu(torch.zeros(len(slots), 48, dtype=dtype)), x, weights, adapters)
        else:
            weight = module("products.linear").pack_slices([torch.ones(48, 2048, dtype=dtype)], 48, dtype)
            base = Product("dense", weight, torch.zeros(48) if bias else None)
            ops = Ops(linear=Linear(dense=module("products.linear").dense))
            module("lora.products").project(base, x, ops, weights, adapters, out_dtype)
        return library.called()

    @pytest.mark.parametrize("slots", [[1], [1] * 8, [*range(1, 9)], [0, 1, 2] * 20], ids=str)
    def test_product_has_two_launches(self, library: Library, slots: list[int]) -> None:
        """The number is the same for one adapter or several, and for all slices of a projection together."""
        assert self.calls(library, slots, op="add") == ["lora_shrink", "lora_expand"]

    def test_small_batch_adds_the_product_itself(self, library: Library) -> None:
        for slots in ([1], [1, 0, 2], [*range(1, 9)] * 2):
            assert self.calls(library, slots) == ["lora_shrink", "small_batch_lora"]
        assert self.calls(library, [1], bias=True, out_dtype=torch.float32) == ["lora_shrink", "small_batch_lora"]

    def test_other_projections_have_a_product_and_two_launches(self, library: Library) -> None:
        """Only the product of a small batch adds the LoRA product itself, and only with few aligned factors."""
        for slots, rank in (([1] * 17, 16), ([1] * 64, 16)):
            assert self.calls(library, slots, rank=rank) == ["lora_shrink", "lora_expand"]
            assert self.calls(library, slots, rank=rank, bias=True) == ["lora_shrink", "lora_expand"]
        for rank in (12, 520):
            assert self.calls(library, [1], rank=rank) == ["lora_shrink", "small_batch", "lora_expand"]

    def test_other_kernels_compute_long_steps(self, library: Library) -> None:
        """Triton or the reference. They see no GPU here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module("lora.products"), "TRITON", False)
            assert self.calls(library, [1] * 257, op="add") == []


def test_every_op_of_the_library_has_a_schema(library: Library) -> None:
    """The ops of the CUDA devices can be created as well."""
    assert set(module("").CUDA_OPS) <= {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if "localllm::" in name
    }
    titles = {name: ops.title(name) for ops in [_with_library(Ops())] for name, _ in ops}
    assert titles["linear.int4"] == "cuda.products.linear.int4"
