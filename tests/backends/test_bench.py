"""The benchmarks of scripts/bench, on the CPU with a very small model."""

from __future__ import annotations

import ast
import gc
import json
import shutil
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
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import DeviceInfo, Runner, Unavailable

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import adapter_swaps
import cuda_libraries
import cuda_models
import host_step
import jobs
import outputs
import rows
import run_stepped
import write_gguf
from idle import Work, idle
from kernel_times import step_time
from llamacpp_steps import LlamaCpp
from programs import Job
from shapes import SHAPES, TINY, TINY_MOE, TINY_SHARED, Shape
from stepping import Stepped
from weights import stand_in, write

SCRIPTS = [
    path
    for path in sorted((Path(__file__).parents[2] / "scripts" / "bench").glob("*.py"))
    if "__main__" in path.read_text()
]
BUDGET = LoadOptions(context=200, max_rows=8, max_step_tokens=128, cache_bytes=2**21)


def bits(files: ModelFiles, name: str) -> np.ndarray:
    stored = files.tensors[name]
    result = np.fromfile(stored.file, np.uint16, stored.num_bytes // 2, offset=stored.start)
    return result.reshape(stored.shape)


def test_random_model_has_all_tensors_and_small_files(tmp_path: Path) -> None:
    for number, shape in enumerate(SHAPES.values()):
        if shape.hidden > 1024:
            continue  # a GiB
        folder = tmp_path / str(number)
        folder.mkdir()
        files = stand_in(shape, folder)
        expected = [stored for tensor in shape.tensors() for stored in tensor.stored()]
        assert [(name, stored.shape) for name, stored in files.tensors.items()] == expected
        for stored in files.tensors.values():
            assert stored.num_bytes == 2 * np.prod(stored.shape)
            assert 0 <= stored.start < stored.stop <= stored.file.stat().st_size
        assert sum(file.stat().st_size for file in folder.iterdir()) < max(2**20, files.weight_bytes / 2)


def test_random_models_depend_on_the_seed_and_layers_differ(tmp_path: Path) -> None:
    made = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        made.append(stand_in(TINY, tmp_path / name, seed))
    weights = [bits(files, "model.layers.0.mlp.up_proj.weight") for files in made]
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])
    assert not np.array_equal(weights[0], bits(made[0], "model.layers.1.mlp.up_proj.weight"))
    values = (weights[0].astype(np.uint32) << 16).view(np.float32)
    assert (values == 0).mean() < 0.01
    assert abs(values.std() * TINY.hidden**0.5 - 1) < 0.1
    assert (bits(made[0], "model.norm.weight") == 0x3F80).all()  # 1.0


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    opened = cpu.open(stand_in(TINY, tmp_path), BUDGET)
    yield opened
    opened.close()


@pytest.mark.real
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
def test_rows_decode_together_near_the_requested_context(runner: Runner, overlap: bool) -> None:
    assert isinstance(runner, TorchRunner)
    runner._spec = replace(runner.spec, overlap=True)
    way = Stepped("way", runner, overlap=overlap)
    assert way.spec.overlap == overlap
    for count, context in ((1, 64), (8, 100), (8, 100), (3, 17)):  # the same again: nothing is left of the first
        way.steady(count, context, 12)
        assert way.steps(12) > 0
        assert way.rows == count
        assert abs(way.mean_context(12) - context) < 2
        assert way.alone(4) > 0
    assert way.first_token(150) > 0
    result = way.throughput([way.prompt(length) for length in (9, 40, 80, 3)], [5, 1, 7, 2], jobs.Sampling())
    assert result.tokens == 15
    assert 7 <= result.steps <= 9


@pytest.mark.real
def test_all_pages_are_written_before_the_measurement(runner: Runner) -> None:
    assert isinstance(runner, TorchRunner)
    for index in range(TINY.layers):
        for pages in runner.kv.cache.layers[index]:
            with torch.inference_mode():
                pages.fill_(torch.nan)
    Stepped("way", runner)
    for index in range(TINY.layers):
        for pages in runner.kv.cache.layers[index]:
            written = pages[1:].isfinite().flatten(1).all(1)
            assert (~written).sum() <= 1, "all but the page that the last tokens began"


@pytest.mark.real
@pytest.mark.timeout(300)
def test_wrong_output_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "SUBJECTS", outputs.SUBJECTS[:2])

    class Broken:
        name = "cpu"

        def probe(self) -> DeviceInfo | Unavailable:
            return cpu.probe()

        def accepts(self, files: ModelFiles) -> str:
            return ""

        def open(self, files: ModelFiles, budget: LoadOptions) -> Runner:
            opened = cpu.open(files, budget)
            if not budget.reference_ops:
                weight = opened.model.norm.weight  # type: ignore[attr-defined]
                opened.model.norm.weight = weight * (1 - 2 * (torch.arange(len(weight)) % 2))  # type: ignore[attr-defined]
            return opened

    files = stand_in(TINY, tmp_path)
    checks = outputs.Checks(cpu, TINY, files, "bf16", LoadOptions(dtype="float32"), layers=1)  # type: ignore[arg-type]
    right = checks.log_probabilities("auto")
    assert right.mean < 1e-4
    assert right.compared > outputs.PROMPTS * outputs.TOP
    assert checks.canary("off", [3]) == 3 * outputs.ANSWER
    assert checks.guide("off") == len(outputs.SUBJECTS) * outputs.ANSWER

    broken = outputs.Checks(Broken(), TINY, files, "bf16", LoadOptions(dtype="float32"), layers=1)
    with pytest.raises(outputs.WrongOutput, match="tiny"):
        broken.log_probabilities("off")
    with pytest.raises(outputs.WrongOutput, match="guide"):
        broken.guide("off")
    with pytest.raises(outputs.WrongOutput, match="canary"):
        broken.canary("off", [3])


def test_idle_time_is_split_into_causes() -> None:
    copy, kernel = "Memcpy HtoD (Pinned -> Device)", "kernel"
    trace = [
        Work(copy, 0.0, 0.5),
        Work(kernel, 1.0, 2.0),  # 0.5 after the copy
        Work(kernel, 1.5, 1.75),  # beside the one before
        Work(kernel, 2.25, 3.0),  # 0.25 within the step
        Work(copy, 4.0, 4.5),  # 1 between steps
        Work(kernel, 4.5, 10.0),
    ]
    result = idle(trace)
    assert result.between == pytest.approx(0.15)
    assert result.within == pytest.approx(0.025)
    assert idle(trace[:1]) == (0.0, 0.0)


def test_kernels_of_a_step_are_added_by_name() -> None:
    step = [Work("void localllm::product<4>(int)", 0.0, 2e-3), Work("norm", 1e-3, 3e-3), Work("norm", 5e-3, 6e-3)]
    later = [Work(work.name, work.start + 6e-3, work.stop + 6e-3) for work in step]
    busy, gaps, kernels = step_time(step + later, 2)
    assert (busy, gaps) == (pytest.approx(4.0), pytest.approx(2.0))
    assert kernels == {"product<4>(int)": (2.0, 1.0), "norm": (2.0, 2.0)}


@pytest.mark.parametrize("model", [TINY, TINY_MOE], ids=["dense", "experts"])
def test_random_blocks_are_a_valid_model_of_llama_cpp(model: Shape, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    shape = replace(model, hidden=256, inner=512, layers=8, heads=4, kv_heads=2, head_dim=64)
    expected = {tensor.gguf: tensor.shape for tensor in shape.tensors()}
    for recipe in write_gguf.RECIPES:
        file = tmp_path / f"{recipe}.gguf"
        write_gguf.write(shape, recipe, file, random_blocks=True)
        tensors = gguf.GGUFReader(file).tensors
        assert {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in tensors} == expected
        for tensor in tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if values.ndim == 1:
                assert (values == 1).all()
            else:
                assert values.std() * values.shape[-1] ** 0.5 == pytest.approx(1, abs=0.1), tensor.name


@pytest.mark.parametrize("model", [TINY_MOE, TINY_SHARED], ids=["routed", "shared"])
def test_a_mixture_of_experts_has_the_same_tensors_in_all_its_files(model: Shape, tmp_path: Path) -> None:
    """The number of weights per token counts top_k experts of a layer."""
    assert SHAPES["qwen3-30b-a3b"].multiplied == pytest.approx(3.04e9, rel=0.01)
    files = stand_in(model, tmp_path)
    assert files.config.moe is not None
    assert (files.config.moe.experts, files.config.moe.top_k) == (8, 2)
    opened = cpu.open(files, BUDGET)
    opened.close()
    write(model, tmp_path / "written")
    read = read_model(tmp_path / "written")
    assert {name: tensor.shape for name, tensor in read.tensors.items()} == {
        name: tensor.shape for name, tensor in files.tensors.items()
    }


def test_llama_cpp_computes_the_measured_steps(tmp_path: Path) -> None:
    for package in ("gguf", "llama_cpp"):
        pytest.importorskip(package)
    peer = LlamaCpp("tiny", "int8", tmp_path, threads=1, gpu=False)
    try:
        assert list(tmp_path.iterdir()) == []
        assert peer.first_token(40) > 0
        for _ in range(2):  # the second time the KV cache has the prompts
            assert peer.steps(3, 40, 4) > 0
    finally:
        peer.close()


def test_compared_functions_alternate() -> None:
    asked: list[str] = []

    def one(name: str, seconds: float) -> float:
        asked.append(name)
        return seconds

    times = jobs.alternate({"a": lambda: one("a", 1.0), "b": lambda: one("b", 2.0)}, 3)
    assert "".join(asked) == "ab" + "ab" + "ba" + "ab"
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3}
    result = jobs.speed_ratio([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 3.0, 1.0])
    assert result.median == 2.0
    assert 1.0 <= result.low <= 2.0 <= result.high <= 3.0


def test_random_request_lengths_equal_the_published_benchmark() -> None:
    prompts, counts = jobs.random_requests(256, 1024)
    assert (sum(map(len, prompts)), sum(counts)) == (142_827, 133_966)


def test_lengths_of_a_sweep() -> None:
    lengths = jobs.sweep_lengths(16_000)
    assert (lengths[0], lengths[-1], len(lengths)) == (1, 16_000, jobs.SWEEP_LENGTHS)
    assert lengths == sorted(set(lengths))
    assert jobs.sweep_lengths(5) == [1, 2, 3, 4, 5]


def test_sweep_repeats_a_slower_measurement() -> None:
    class Way:
        def __init__(self, label: str, slow_turns: int = 0) -> None:
            self.label, self.slow_turns, self.asked = label, slow_turns, dict.fromkeys(range(1, 6), 0)

        def first_token(self, length: int) -> float:
            self.asked[length] += 1
            return 2.0 if length == 3 and self.asked[length] <= self.slow_turns else 1.0

    def swept(*ways: Way) -> dict[str, Any]:
        setting = jobs.Setting(TINY, rows.row, ways=ways, max_length=5, rounds=2)
        return dict(next(iter(jobs.sweep(setting))))

    by_chance = swept(Way("a", slow_turns=3), Way("b"))  # one turn that does not count, and two
    assert by_chance["ours"] == 1.0
    assert by_chance["again"] == {"lengths": [3], "rounds": 2 * jobs.REPEAT_ROUNDS}
    slower = swept(Way("a", slow_turns=99), Way("b"))
    assert (slower["ours"], slower["length"], slower["interval"]) == (0.5, 3, [0.5, 0.5])


@pytest.mark.real
@pytest.mark.timeout(300)
def test_program_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = """bench --backend cpu --shape tiny --ways auto,off/in-turn --formats bf16,int8 --cells 1x40,4x64
    --jobs decode,idle,prefill,sweep,mixed,even:off/in-turn --steps 4 --rounds 2 --lengths 24
    --longest 5 --requests 4 --most 12 --runs 1 --step-tokens 64 --check-layers 1 --canary 2
    --peers transformers --save"""
    monkeypatch.setattr(sys, "argv", [*command.split(), ""])
    monkeypatch.setattr(outputs.Checks, "guide", lambda *_: 1)  # takes a while, and has its own test
    cuda_models.main()
    said = capsys.readouterr()
    assert "idle: the profiler does not support" in said.err
    results = [json.loads(line) for line in said.out.splitlines()]
    names = [row["name"] for row in results]
    assert len(names) == len(set(names))
    for fmt in ("bf16", "int8"):
        for what in (
            "log-probabilities against float32 references, graphs auto",
            "decode, 1 row of 40 tokens, auto",
            "decode, 4 rows of 64 tokens, off/in-turn",
            "first token of a prompt of 24, auto",
            "first token at 5 lengths, auto: the worst ratio to off/in-turn",
            "4 requests of 12 to 12 in and out, auto",
            "4 requests of 12 in and out, off/in-turn",
        ):
            assert f"tiny shape, {fmt}, {what}" in names
        assert f"tiny shape, {fmt}, 4 requests of 12 in and out, auto" not in names
    exact = "tokens of the canary model and guide, all right, graphs"
    assert [name for name in names if exact in name] == [f"tiny shape, bf16, {exact} {way}" for way in ("auto", "off")]
    peers = {row["name"]: row["against"] for row in results if "against" in row}
    assert peers["tiny shape, bf16, decode, 1 row of 40 tokens, auto"].startswith("transformers")
    assert peers["tiny shape, int8, decode, 1 row of 40 tokens, auto"] == "off/in-turn"
    assert all(row["ours"] > 0 for row in results if row["unit"] != "millinats")
    timed = [row for row in results if row["unit"] not in ("millinats", "tokens")]
    assert [row["name"] for row in timed if not (row.get("rounds") or row.get("runs"))] == []


@pytest.mark.real
def test_only_outputs_are_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench --backend cpu --shape tiny --ways off --formats bf16,fp8 --check-layers 1 --canary 2 --jobs"
    monkeypatch.setattr(sys, "argv", [*command.split(), "", "--save", ""])
    monkeypatch.setattr(outputs.Checks, "guide", lambda *_: 1)
    cuda_models.main()
    names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    near, exact = "log-probabilities against float32 references", "tokens of the canary model and guide"
    assert [name.split(", ")[1:3] for name in names] == [["bf16", near], ["bf16", exact], ["fp8", near]]


@pytest.mark.real
def test_failed_job_does_not_stop_other_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "bench --backend cpu --shape tiny --ways off --cells 1x20 --jobs broken,decode --steps 2 --rounds 1"

    def broken(setting: jobs.Setting) -> Iterator[dict[str, object]]:
        yield setting.row("before", 1.0, "s")
        raise RuntimeError("this is the end")

    monkeypatch.setitem(jobs.JOBS, "broken", broken)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", [*command.split(), "--unchecked"])
    with pytest.raises(SystemExit, match="these jobs failed: broken"):
        cuda_models.main()
    said = capsys.readouterr()
    assert "this is the end" in said.err
    names = [json.loads(line)["name"] for line in said.out.splitlines()]
    whole = "tiny shape, bf16, "
    assert names == [f"{whole}open, off", f"{whole}before", f"{whole}decode, 1 row of 20 tokens, off"]


def test_ways_of_a_model_have_options() -> None:
    ways = [
        cuda_models.Way.parse(text) for text in ("full", "full/in-turn", "auto/one-queue", "auto/one-queue/in-turn")
    ]
    assert [way.overlap for way in ways] == [True, False, True, False]
    assert [way.queues for way in ways] == ["measured", "measured", "one", "one"]


def test_new_results_replace_rows_with_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)

    def made(name: str, ours: int, machine: str = "here") -> rows.Row:
        return {"name": name, "ours": ours, "machine": machine}

    def kept() -> list[tuple[str, int]]:
        result = map(json.loads, (tmp_path / "x.jsonl").read_text("utf-8").splitlines())
        return [(row["name"], row["ours"]) for row in result]

    rows.save("x", [made("a", 1, "there"), made("a", 2), made("b", 3)])
    rows.save("x", [made("b", 4), made("c", 5)], part=True)
    assert kept() == [("a", 1), ("a", 2), ("b", 4), ("c", 5)]
    rows.save("x", [made("d", 6)])
    assert kept() == [("a", 1), ("d", 6)], "the whole replaces the machine's rows"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ways", "quick"], "quick: one of auto, full"),
        (["--ways", "off/out"], "in-turn"),
        (["--ways", "off/one-queue/out"], "one-queue"),
        (["--jobs", "x"], "x: not"),
        (["--jobs", "decode:auto+full"], "full: not among --ways"),
    ],
)
def test_unknown_arguments_are_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit):
        cuda_models.main()
    assert says in capsys.readouterr().err


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
    assert len(host_step.runner_microseconds(2, 64, jobs.Sampling(), 5)) == 5


def test_adapter_swaps_are_measured_under_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--backend cpu --shape tiny --streams 2 --swaps 5".split()
    monkeypatch.setattr("sys.argv", ["adapter_swaps.py", *arguments, "--save", ""])
    adapter_swaps.main()
    gc.unfreeze()
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["count"] for result in results if "load of" in result["name"]] == [5]
    assert len(results) == 9
    assert all(result["ours"] > 0 for result in results)


def test_run_stepped_answers_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stepped, "cuda", cpu)
    model = run_stepped.Model("tiny", "none", rows=2, context=128)
    assert model.hello["load_seconds"] > 0
    assert model.do("decode", 2, 32, 4)["seconds"] > 0
    answer = model.do("prefill", 1, 40, 0)
    assert 0 < answer["launch_seconds"] < answer["seconds"]


def test_ratio_of_two_libraries_is_that_of_their_speeds() -> None:
    class Loaded:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def do(self, job: Job) -> dict[str, float]:
            return {"seconds": self.seconds, "launch_seconds": 0.05, "allocations": 2}

    programs: Any = {"wheel": Loaded(0.12), "built": Loaded(0.24)}
    figure = cuda_libraries._compared("8B", "GPU", programs, Job("decode", 1, 128, 24), 3, {})
    assert figure["ours"] == 5.0
    assert figure["peer"] == 10.0
    assert figure["ratio"] == 2.0
    assert "launching" not in figure
    figure = cuda_libraries._compared("8B", "GPU", programs, Job("prefill", 1, 512), 3, {})
    assert figure["launching"] == {"wheel": 50.0, "built": 50.0}
    assert figure["allocations"] == {"wheel": 6, "built": 6}
    assert shutil.which("gcc", path=cuda_libraries.NO_COMPILERS["PATH"]) is None
