"""Weights quantised while loading: their errors, their memory, and their packed file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from localllm.backends.cpu.device import DEVICE, open_on_cpu
from localllm.backends.pytorch import checksums, loading
from localllm.backends.pytorch import quant as formats
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.packed import fingerprint
from localllm.backends.pytorch.quant import Loaded, choose, floats, fp8, int4, int8, slices
from localllm.backends.pytorch.quant.floats import Floats
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.kernels.cpu.products import linear
from localllm.kernels.ops import Ops
from localllm.kernels.ops.linear import Int4, map_tensors, weight_tensors
from localllm.kernels.ops.linear_int4 import spread
from localllm.kernels.ops.linear_int8 import Int8

from . import canary
from .batches import Row, make_batch
from .tiny import HIDDEN, TINIES

QUANTS: tuple[Quant, ...] = ("int8", "int4", "fp8")
BUDGET = LoadOptions(cache_bytes=2**20, max_rows=4, threads=1)
FREE = 2**30


def weight(out_features: int = 33, in_features: int = 165) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(3)) / in_features**0.5


@pytest.mark.parametrize(
    ("quantise", "steps"),
    [(int8.quantise, 2 * 127), (int4.quantise, 15)],
    ids=["int8", "int4"],
)
def test_rounding_is_to_the_nearest_step(quantise, steps: int) -> None:
    """The error is at most half a quantisation step, plus the rounding of float16 scales."""
    plain = weight()
    quantised = quantise(plain)
    group = getattr(quantised, "group", plain.shape[1])
    for start in range(0, plain.shape[1], group):
        part, result = plain[:, start : start + group], quantised.dense()[:, start : start + group]
        reach = part.abs().amax(1) * 2 if steps > 15 else part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)
        assert ((result - part).abs() <= (reach / steps * 0.5 * 1.01).unsqueeze(1) + part.abs() * 1e-3).all()


def test_fp8_rounds_to_three_bits_of_mantissa() -> None:
    plain = weight()
    result = fp8.quantise(plain).dense()
    normal = plain.abs() > plain.abs().amax(1, keepdim=True) * 2.0**-14
    assert ((result - plain).abs() <= plain.abs() * 2.0**-4)[normal].all()


def test_int4_rounds_by_the_stored_scale() -> None:
    """The error is at most half a step of the stored scale, except at the ends of the range."""
    plain = weight()
    quantised = int4.quantise(plain)
    nibbles = torch.stack((quantised.data & 15, quantised.data >> 4), dim=-1).flatten(-2)[:, : quantised.in_features]
    step = spread(quantised.scale.float(), quantised.group, quantised.in_features)
    inside = (nibbles > 0) & (nibbles < 15)
    assert ((quantised.dense() - plain).abs() <= step * 0.5001)[inside].all()


def test_fp8_represents_the_largest_magnitude() -> None:
    plain = weight()
    torch.testing.assert_close(fp8.quantise(plain).dense().abs().amax(1), plain.abs().amax(1), rtol=1e-6, atol=0.0)


def test_fp8_w8a8_permits_rounded_activations() -> None:
    plain = weight()
    quantised, other = fp8.quantise_w8a8(plain), fp8.quantise(plain)
    assert torch.equal(quantised.dense(), other.dense())
    assert (quantised.rounds, other.rounds) == (True, False)


@pytest.mark.parametrize("quantise", [int8.quantise, int4.quantise, fp8.quantise])
def test_zeros_stay_zeros(quantise) -> None:
    plain = weight(40, 70)
    plain[5] = 0.0
    plain[7, :64] = 0.0
    quantised = quantise(plain)
    assert torch.equal(quantised.dense()[plain == 0.0], torch.zeros(int((plain == 0.0).sum())))


@pytest.mark.parametrize("quantise", [int8.quantise, int4.quantise, fp8.quantise, lambda plain: plain])
@pytest.mark.parametrize("ops", [Ops(), DEVICE.ops], ids=["references", "kernels"])
def test_slices_equal_the_concatenated_weight(ops: Ops, quantise, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three concatenated weights, with slices that span two weights."""
    plain = weight(16 + 72 + 33, 70)
    monkeypatch.setattr(formats, "SLICE_VALUES", 32 * 70)
    three = [
        Loaded(len(part), 70, lambda start, stop, part=part: quantise(part[start:stop]))
        for part in plain.split([16, 72, 33])
    ]
    cut = list(slices(three))
    assert [len(weight_tensors(one)[0]) for one in cut] == [32, 32, 32, 25]
    packed = ops.linear.pack_slices(iter(cut), len(plain), torch.float32)
    for one, other in zip(
        weight_tensors(packed), weight_tensors(ops.linear.pack(quantise(plain), torch.float32)), strict=True
    ):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("quant", QUANTS)
def test_weights_are_quantised_on_the_device_of_the_model(
    quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's device "meta" stands in for a GPU."""
    devices: list[str] = []
    original = choose.ON_LOAD[quant]

    def quantise(weight: torch.Tensor) -> Any:
        devices.append(weight.device.type)
        return original(weight)

    monkeypatch.setattr(choose, "ON_LOAD", {quant: quantise})
    monkeypatch.setattr(floats, "check_finite", lambda *_: None)  # tensors of this device have no values
    files = files_of("llama", tmp_path)
    options = replace(BUDGET, quant=quant)
    loader = loading.Loader(files, options, replace(DEVICE, type="meta", ops=Ops()), torch.float32)
    with pytest.raises(ModelRefused, match="tensors are not part of"):
        loader.load(lambda weights: weights.linear(["model.layers.0.mlp.up_proj"], [80], HIDDEN), 0)
    assert set(devices) == {"meta"}


def test_weights_with_different_formats_share_no_product() -> None:
    def stored(dtype: torch.dtype) -> Loaded:
        return Loaded(16, 4, lambda start, stop: torch.zeros(stop - start, 4, dtype=dtype))

    assert stored(torch.bfloat16).joins(stored(torch.bfloat16))
    assert not stored(torch.bfloat16).joins(stored(torch.float32))


def test_weights_with_another_kind_or_order_share_no_product() -> None:
    def stored(quantise, order: list[int] | None = None, wide: bool = False, in_features: int = 64) -> Loaded:
        plain = weight(16, in_features)
        permuted = None if order is None else torch.tensor(order)
        return Loaded(16, in_features, lambda start, stop: quantise(plain[start:stop]), wide=wide, order=permuted)

    def with_zeros(plain: torch.Tensor) -> Int4:
        quantised = int4.quantise(plain)
        return quantised._replace(group=32, scale=quantised.scale.repeat(1, 2), zero=quantised.zero.repeat(1, 2))

    natural, permuted = list(range(64)), [1, 0, *range(2, 64)]
    kinds = [
        stored(int8.quantise),
        stored(fp8.quantise),
        stored(int4.quantise),
        stored(with_zeros),
        stored(int4.quantise, wide=True),
        stored(int4.quantise, natural, wide=True),
        stored(int4.quantise, permuted, wide=True),
        stored(lambda plain: plain),
    ]
    assert [one.product for one in kinds] == [
        "int8",
        "fp8",
        "int4",
        "int4",
        "int4_wide",
        "int4_wide",
        "int4_wide",
        "dense",
    ]
    for at, one in enumerate(kinds):
        assert [one.joins(other) for other in kinds] == [at == other for other in range(len(kinds))]


def files_of(label: str, folder: Path) -> ModelFiles:
    next(tiny for tiny in TINIES if tiny.label == label).save(folder)
    return read_model(folder)


def logits(runner: TorchRunner) -> torch.Tensor:
    """Logits of the last token of a short prompt."""
    ops = runner.device.ops
    with torch.inference_mode():
        step = runner.inputs.send(
            make_batch([Row([5, 9, 77, 3, 20], 0, [1])], runner.spec.vocab_size, groups=len(runner.spec.groups))
        ).step
        return runner.model.logits(runner.model(step, ops, runner.kv), ops)[0]


@pytest.mark.real
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("label", ["llama", "qwen2-tied", "gemma3", "phi3"])
def test_quantised_model_is_near_the_float_model(label: str, quant: Quant, tmp_path: Path) -> None:
    files = files_of(label, tmp_path)
    plain, small = (open_on_cpu(files, replace(BUDGET, quant=each), FREE) for each in ("none", quant))
    near = torch.cosine_similarity(logits(plain), logits(small), dim=0)
    assert near > {"int8": 0.99, "int4": 0.6, "fp8": 0.98}[quant]
    assert small.spec.quant == quant
    assert plain.spec.quant == ""
    assert small.spec.weight_bytes < plain.spec.weight_bytes


@pytest.mark.parametrize("label", ["llama", "llama-tied"])
@pytest.mark.parametrize("quant", ["none", *QUANTS])
def test_expected_bytes_are_near_the_loaded_bytes(quant: Quant, label: str, tmp_path: Path) -> None:
    files = files_of(label, tmp_path)
    device = replace(DEVICE, ops=Ops())
    runner = open_runner(files, replace(BUDGET, quant=quant), device, FREE)
    expected = loading.Loader(files, replace(BUDGET, quant=quant), device, torch.float32).expected_bytes()
    assert expected == pytest.approx(runner.spec.weight_bytes, rel=0.01 if quant == "none" else 0.07)


class OneLayout:
    """A layout of weights that notes their products."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def lay_out(self, op: str, weight: Any) -> Any:
        assert weight_tensors(weight)
        self.ops.append(op)
        return weight

    def warnings(self) -> tuple[str, ...]:
        return (f"{len(self.ops)} weights",)


class TestKept:
    """The packed file."""

    @pytest.fixture(autouse=True)
    def worth_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "MIN_PACKED_BYTES", 0)

    @staticmethod
    def open(files: ModelFiles, folder: Path, quant: Quant = "int4") -> TorchRunner:
        return open_on_cpu(files, replace(BUDGET, quant=quant, packed_dir=folder), FREE)

    @pytest.mark.real
    @pytest.mark.parametrize("quant", QUANTS)
    def test_second_load_reads_the_packed_file(
        self, quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files, folder = files_of("qwen2", tmp_path / "model"), tmp_path / "packed"
        first = logits(self.open(files, folder, quant))
        assert [file.name for file in folder.iterdir()] == [f"{quant}.safetensors"]
        monkeypatch.setattr(Floats, "load", pytest.fail)
        placed: list[object] = []
        monkeypatch.setattr(linear.Packed, "place", lambda weight: placed.append(weight))
        second = self.open(files, folder, quant)
        assert torch.equal(first, logits(second))
        assert len(placed) > 4 * files.config.num_layers, "memory near the workers, before anything is read"

    def test_weights_are_laid_out_after_a_conversion_and_after_a_read(self, tmp_path: Path) -> None:
        """The packed file has no memory formats of a device."""
        files, folder = files_of("qwen2_moe", tmp_path / "model"), tmp_path / "packed"
        options = replace(BUDGET, quant="int8", packed_dir=folder)
        ops = []
        for _ in range(2):
            layout = OneLayout()
            runner = open_runner(files, options, replace(DEVICE, layout=layout), FREE)
            ops.append(sorted(layout.ops))
            assert f"{len(layout.ops)} weights" in runner.spec.warnings
        assert ops[0] == ops[1]
        assert {"int8", "dense"} == set(ops[0])

    @pytest.mark.parametrize("damage", ["config", "weights", "cut", "text", "mark", "version"])
    def test_other_packed_file_is_replaced(self, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files, folder = files_of("llama", tmp_path / "model"), tmp_path / "packed"
        self.open(files, folder)
        packed_file = folder / "int4.safetensors"
        before = packed_file.stat().st_mtime_ns, packed_file.read_bytes()
        if damage == "config":
            config = json.loads((files.path / "config.json").read_text())
            (files.path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-5}))
        elif damage == "weights":
            (files.path / "model.safetensors").touch()
        elif damage == "cut":
            packed_file.write_bytes(before[1][:-70])
        elif damage == "text":
            packed_file.write_text("not a file of ours")
        elif damage == "mark":
            packed_file.write_bytes(before[1].replace(b'"fingerprint": "', b'"fingerprint":"0', 1))
        else:
            monkeypatch.setattr("localllm.backends.pytorch.packed.VERSION", 99)
        self.open(read_model(files.path), folder)
        assert packed_file.stat().st_mtime_ns != before[0]
        assert [file.name for file in folder.iterdir()] == ["int4.safetensors"]

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.9, 0.999, 1.0])
    def test_flipped_bit_is_detected(self, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A bit flips in the header, the data or the checksums: the weights are quantised again, and are correct."""
        monkeypatch.setattr(checksums, "BLOCK", 1000)
        files, folder = files_of("llama", tmp_path / "model"), tmp_path / "packed"
        first = logits(self.open(files, folder))
        packed_file = folder / "int4.safetensors"
        sound = packed_file.read_bytes()
        damaged = bytearray(sound)
        damaged[round(share * (len(sound) - 1))] ^= 1
        packed_file.write_bytes(damaged)
        assert torch.equal(logits(self.open(files, folder)), first)
        assert packed_file.read_bytes() == sound

    def test_readable_but_wrong_header_is_detected(self, tmp_path: Path) -> None:
        files, folder = files_of("llama", tmp_path / "model"), tmp_path / "packed"
        first = logits(self.open(files, folder))
        packed_file = folder / "int4.safetensors"
        sound = packed_file.read_bytes()
        damaged = sound.replace(rb"\"int4\"", rb"\"int8\"", 1)
        assert damaged != sound
        packed_file.write_bytes(damaged)
        assert torch.equal(logits(self.open(files, folder)), first)
        assert packed_file.read_bytes() == sound

    def test_other_layout_is_not_read(self, tmp_path: Path) -> None:
        """E.g. after an update of the kernels, or without the kernels."""
        files, folder = files_of("llama", tmp_path / "model"), tmp_path / "packed"

        def permuted(cut, out_features, dtype):
            return map_tensors(Ops().linear.pack_slices(cut, out_features, dtype), lambda part: part.flip(0))

        for pack in (Ops().linear.pack_slices, permuted):
            ops = replace(Ops(), linear=replace(Ops().linear, pack_slices=pack))
            open_runner(files, replace(BUDGET, quant="int8", packed_dir=folder), replace(DEVICE, ops=ops), FREE)
        before = (folder / "int8.safetensors").stat().st_mtime_ns
        open_runner(files, replace(BUDGET, quant="int8", packed_dir=folder), replace(DEVICE, ops=Ops()), FREE)
        assert (folder / "int8.safetensors").stat().st_mtime_ns != before

    def test_model_loads_without_a_writable_folder(self, tmp_path: Path) -> None:
        files = files_of("llama", tmp_path / "model")
        (tmp_path / "packed").write_text("a file stands in the way")
        assert self.open(files, tmp_path / "packed").spec.quant == "int4"

    def test_small_models_are_not_cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        self.open(files_of("llama", tmp_path / "model"), tmp_path / "packed")
        assert not (tmp_path / "packed").exists()

    def test_float_weights_are_not_cached(self, tmp_path: Path) -> None:
        self.open(files_of("llama", tmp_path / "model"), tmp_path / "packed", "none")
        assert not (tmp_path / "packed").exists()


class Renamed(NamedTuple):
    """The tensors of an Int8 in another order."""

    data: torch.Tensor
    scale: torch.Tensor


def test_fingerprint_depends_on_all_inputs(tmp_path: Path) -> None:
    canary.save(tmp_path)
    weights, sample = tmp_path / "model.safetensors", (torch.zeros(2, 32, dtype=torch.int8), torch.ones(2))

    def mark(quant: str = "int8", quantised: Any = Int8(*sample)) -> str:
        return fingerprint(read_model(tmp_path), quant, quantised)

    fingerprints = [mark()]
    assert mark() == fingerprints[0]
    fingerprints += [mark("int4"), mark(quantised=Renamed(*sample)), mark(quantised=Int8(sample[0] + 1, sample[1]))]
    fingerprints.append(mark(quantised=Int8(sample[0], sample[1] * 2)))
    os.utime(weights, ns=(0, 7))
    fingerprints.append(mark())
    before = weights.read_bytes()
    weights.write_bytes(before.replace(b'"F32"', b'"I32"', 1))
    os.utime(weights, ns=(0, 7))
    fingerprints.append(mark())
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + " ")
    fingerprints.append(mark())
    assert len(set(fingerprints)) == len(fingerprints)
