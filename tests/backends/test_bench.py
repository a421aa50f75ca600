"""The benchmarks of scripts/bench, on the CPU with a very small model."""

from __future__ import annotations

import ast
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localllm.backends import cpu
from localllm.backends.cpu.device import OPS
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Backend, Runner
from localllm.kernels.ops.cases.reference_check import pack_value

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import gguf_file
import host_step
import models
import outputs
import rows
from programs import Job
from run_localllm import Localllm, random_requests
from shapes import SHAPES, TINY, TINY_MOE, TINY_SHARED, Shape
from weights import stand_in
from works import REFERENCES, families

BENCH = Path(models.__file__).parent
SCRIPTS = [path for path in sorted(BENCH.glob("*.py")) if "__main__" in path.read_text()]


def bits(files: ModelFiles, name: str) -> np.ndarray:
    stored = files.tensors[name]
    result = np.fromfile(stored.file, np.uint16, stored.num_bytes // 2, offset=stored.start)
    return result.reshape(stored.shape)


@pytest.mark.parametrize("shape", [TINY, TINY_MOE, TINY_SHARED], ids=["dense", "experts", "shared"])
def test_random_model_has_all_tensors(shape: Shape, tmp_path: Path) -> None:
    files = stand_in(shape, tmp_path)
    expected = [stored for tensor in shape.tensors() for stored in tensor.stored()]
    assert [(name, stored.shape) for name, stored in files.tensors.items()] == expected
    for stored in files.tensors.values():
        assert stored.num_bytes == 2 * np.prod(stored.shape)
        assert 0 <= stored.start < stored.stop <= stored.file.stat().st_size
    cpu.open(files, LoadOptions(context=200, max_rows=8, cache_bytes=2**21)).close()


def test_random_model_needs_little_disk_space(tmp_path: Path) -> None:
    files = stand_in(replace(SHAPES["moe-1b"], vocab=512), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < files.weight_bytes / 2


def test_random_models_depend_on_the_seed_and_layers_differ(tmp_path: Path) -> None:
    made = [stand_in(TINY, tmp_path, seed) for seed in (0, 0, 1)]
    weights = [bits(files, "model.layers.0.mlp.up_proj.weight") for files in made]
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])
    assert not np.array_equal(weights[0], bits(made[0], "model.layers.1.mlp.up_proj.weight"))
    values = (weights[0].astype(np.uint32) << 16).view(np.float32)
    assert (values == 0).mean() < 0.01
    assert abs(values.std() * TINY.hidden**0.5 - 1) < 0.1
    assert (bits(made[0], "model.norm.weight") == 0x3F80).all()  # 1.0


@pytest.mark.parametrize("model", [TINY, TINY_MOE], ids=["dense", "experts"])
def test_random_blocks_are_a_valid_model_of_llama_cpp(model: Shape, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    shape = replace(model, hidden=256, inner=512, layers=8, heads=4, kv_heads=2, head_dim=64)
    expected = {tensor.gguf: tensor.shape for tensor in shape.tensors()}
    for recipe in gguf_file.RECIPES:
        file = tmp_path / f"{recipe}.gguf"
        gguf_file.write(shape, recipe, file)
        tensors = gguf.GGUFReader(file).tensors
        assert {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in tensors} == expected
        for tensor in tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if values.ndim == 1:
                assert (values == 1).all()
            else:
                assert values.std() * values.shape[-1] ** 0.5 == pytest.approx(1, abs=0.1), tensor.name


@pytest.mark.real
@pytest.mark.timeout(300)
def test_wrong_output_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(files: ModelFiles, options: LoadOptions) -> Runner:
        opened = cpu.open(files, options)
        if not options.ops:
            weight = opened.model.norm.weight  # type: ignore[attr-defined]
            opened.model.norm.weight = weight * (1 - 2 * (torch.arange(len(weight)) % 2))  # type: ignore[attr-defined]
        return opened

    def compared(open_model: Any) -> dict[str, Any]:
        backend: Backend = type("Backend", (), {"name": "cpu", "open": staticmethod(open_model)})()
        return outputs.compare(backend, TINY, stand_in(TINY, tmp_path), "none")

    right = compared(cpu.open)
    assert right["mean"] < 30
    assert right["compared"] > outputs.PROMPTS * outputs.TOP
    with pytest.raises(outputs.WrongOutput):
        compared(broken)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Localllm]:
    options = {"context": 200, "max_rows": 8, "max_step_tokens": 128, "cache_bytes": 2**21}
    yield Localllm("tiny", str(tmp_path), "cpu", options, adapters=2)
    gc.unfreeze()


@pytest.mark.real
def test_all_rows_decode_in_the_timed_steps(model: Localllm) -> None:
    for count, context in ((1, 64), (8, 100), (8, 100), (3, 17)):  # the same again: nothing is left of the first
        assert model.do("decode", count, context, 12, 0)["seconds"] > 0
    assert model.do("decode", 4, 20, 4, 2)["seconds"] > 0
    assert model.do("prefill", 1, 150, 0, 0)["seconds"] > 0
    assert model.do("requests", 4, 30, 0, 0)["tokens"] == sum(random_requests(4, 30)[1])
    assert model.do("read", 1, 0, 0, 0)["bandwidth"] > 0


@pytest.mark.real
def test_a_profile_names_the_kernels(model: Localllm, capsys: pytest.CaptureFixture[str]) -> None:
    model.do("profile", 2, 16, 3, 0)
    assert "localllm::" in capsys.readouterr().err


def test_a_cache_that_is_too_small_is_an_error(model: Localllm) -> None:
    with pytest.raises(AssertionError, match="the cache is too small"):
        model.do("decode", 9, 20, 4, 0)


def test_random_request_lengths_equal_the_published_benchmark() -> None:
    lengths, counts = random_requests(256, 1024)
    assert (sum(lengths), sum(counts)) == (142_827, 133_966)


@pytest.mark.real
@pytest.mark.timeout(300)
def test_program_compares_ways_with_peers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("gguf", "llama_cpp"):
        pytest.importorskip(package)
    command = """bench --backend cpu --shape tiny --formats int8 --jobs decode:2x40,requests:3x12 --steps 4 --rounds 1
    --ways auto threads=1 --peers llama.cpp --check-layers 1 --save"""
    monkeypatch.setattr(sys, "argv", [*command.split(), ""])
    models.main()
    results = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    title = "tiny shape, int8"
    assert list(results) == [
        f"{title}, log-probabilities against float32 references",
        *(f"{title}, load, {way}" for way in ("auto", "threads=1")),
        *(f"{title}, decode, 2 rows of 40 tokens, {way}" for way in ("auto", "threads=1")),
        *(f"{title}, 3 requests of up to 12 in and out, {way}" for way in ("auto", "threads=1")),
    ]
    decode = results[f"{title}, decode, 2 rows of 40 tokens, threads=1"]
    assert decode["against"] == "llama.cpp q8_0"
    assert decode["ratio"] == pytest.approx(decode["peer"] / decode["ours"], rel=0.01)
    assert decode["tokens_per_second"] == pytest.approx(2e3 / decode["ours"], rel=0.01)
    assert results[f"{title}, 3 requests of up to 12 in and out, threads=1"]["against"] == "auto"


def test_ways_are_options_and_variables() -> None:
    way = models.Way.parse("graphs=off,threads=2,LOCALLLM_CPU_LANE=generic")
    assert way.options == {"graphs": "off", "threads": 2}
    assert way.environment == {"LOCALLLM_CPU_LANE": "generic"}
    assert models.Way.parse("auto")[1:] == ({}, {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ways", "graph=off"], "graph: no option of a load"),
        (["--ways", "quick"], "invalid"),
        (["--jobs", "x"], "x: not such as decode:8x1024"),
        (["--formats", "int3"], "int3: not among bf16"),
        (["--shape", "gpt"], "gpt: not among guide"),
        (["--peers", "x"], "x: not among llama.cpp"),
    ],
)
def test_unknown_arguments_are_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit):
        models.main()
    assert says in capsys.readouterr().err


def test_job_is_parsed() -> None:
    assert Job.parse("decode:64x128@8") == Job("decode", 64, 128, adapters=8)
    assert Job.parse("prefill:512") == Job("prefill", 1, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_works_run_by_the_ops_and_by_torch(dtype: torch.dtype) -> None:
    ops = dict(OPS)
    for works in families(TINY, TINY_MOE, ["bf16", "mxfp4"], [3], dtype).values():
        for work in works:
            (work.reference or REFERENCES[work.op])(**work.make())
            packed = {name: pack_value(OPS, value, dtype) for name, value in work.make().items() if name in work.packs}
            ops[work.op](**work.make() | packed)


def test_new_results_replace_rows_with_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)

    def made(name: str, ours: int, machine: str = "here") -> rows.Row:
        return {"name": name, "ours": ours, "machine": machine}

    rows.save("x", [made("a", 1, "there"), made("a", 2), made("b", 3)])
    rows.save("x", [made("b", 4), made("c", 5)])
    saved = map(json.loads, (tmp_path / "x.jsonl").read_text("utf-8").splitlines())
    assert [(row["name"], row["ours"]) for row in saved] == [("a", 1), ("a", 2), ("b", 4), ("c", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_prints_its_help(script: Path) -> None:
    help_text = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True
    ).stdout
    docstring = ast.get_docstring(ast.parse(script.read_text("utf-8")))
    assert docstring is not None
    assert docstring.splitlines()[0] in help_text


def test_the_host_step_runs_with_and_without_the_runner() -> None:
    assert len(host_step.microseconds(host_step.CASES[0], 5)) == 5
    assert len(host_step.runner_microseconds(2, 64, host_step.Sampling(), 5)) == 5
