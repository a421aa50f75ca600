"""The CUDA kernels compile without a GPU and do not spill registers. test_cuda.py runs them on a GPU.

The fast tests compile without optimisation and for Hopper only, whose kernels include those of all other GPUs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm import kernels

ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
KERNELS = {
    "layers/activation": "gated",
    "layers/append": "append_vectors",
    "attention/decode": "decode_kernel",
    "attention/prefill": "prefill_kernel",
    "attention/prefill_mma": "prefill_mma_kernel",
    "moe/choices": "choice_kernel",
    "layers/embedding": "look_up",
    "layers/kv": "put",
    "products/small_batch/dense": "small_batch",
    "products/small_batch/fp8": "small_batch",
    "products/small_batch/int4": "small_batch",
    "products/small_batch/int4_wide": "small_batch",
    "products/small_batch/int8": "small_batch",
    "lora/products": "shrink_tiles",
    "layers/norm": "normalise",
    "products/one_row/one_row": "one_row_kernel",
    "products/one_row/hopper": "one_row_hopper_kernel",
    "layers/rope": "rotate",
    "products/round_rows": "round_rows_kernel",
    "step/step": "step_kernel",
    "products/tiled/fp8": "tiled",
    "products/tiled/int4": "tiled",
    "products/tiled/int4_wide": "tiled",
    "products/tiled/int8": "tiled",
    "products/widen": "widen_kernel",
}
FOLDER = Path(next(iter(kernels.__path__))) / "cuda"
SPILL_CHECK = "-Xptxas=--warn-on-spills", "-Xptxas=--warning-as-error"
SPILLING = """
__global__ void __launch_bounds__(1024, 2) spill(const float* in, float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; i++) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; i++) out[i * 1024 + threadIdx.x] = values[95 - i] * values[i];
}
"""

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """The standard error of a command that succeeds."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def configure(folder: Path, *options: str) -> None:
    cuda = "-DLOCALLLM_CUDA=ON", "-DLOCALLLM_CUDA_ARCHITECTURES=90a-real", "-DVARIANTS=generic"
    run("cmake", "-S", FOLDER.parent, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", *cuda, *options)


def entries(log: str) -> list[tuple[str, str]]:
    """(kernel, architecture) of every kernel in the log of `nvcc -Xptxas=-v`"""
    return re.findall(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", log)


def test_every_source_has_a_kernel_name() -> None:
    assert {str(source.relative_to(FOLDER).with_suffix("")) for source in FOLDER.rglob("*.cu")} == set(KERNELS)


# Sources of test_source_compiles_for_hopper that are not slow: one of each kind that compiles fast.
OFTEN = (
    "layers/activation",
    "layers/append",
    "layers/kv",
    "products/small_batch/int8",
    "lora/products",
    "layers/rope",
    "step/step",
    "products/tiled/int8",
    "products/widen",
)


@pytest.mark.parametrize("stem", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.slow]) for n in KERNELS])
def test_source_compiles_for_hopper(stem: str, tmp_path: Path) -> None:
    quick = "-Xcicc=-O1", "-Xptxas=-O0", "-DLOCALLLM_HOPPER", "-gencode=arch=compute_90a,code=sm_90a"
    run("nvcc", "-std=c++17", "-cubin", *quick, f"{stem}.cu", "-o", tmp_path / "out.cubin", cwd=FOLDER)
    assert KERNELS[stem].encode() in (tmp_path / "out.cubin").read_bytes()


@pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja is not installed")
def test_bindings_compile_and_the_build_has_every_source(tmp_path: Path) -> None:
    """The bindings compile with a torch without CUDA: libtorch_cuda is linked when the library loads."""
    configure(tmp_path, "-GNinja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")
    objects = "cuda/CMakeFiles/localllm_cuda.dir"
    plan = (tmp_path / "build.ninja").read_text()
    sources = {str(source.relative_to(FOLDER)) for pattern in ("*.cu", "*.cpp") for source in FOLDER.rglob(pattern)}
    assert sources <= set(re.findall(rf"^build {objects}/(\S+)\.o:", plan, re.MULTILINE))
    assert all(flag in plan for flag in SPILL_CHECK)
    run("cmake", "--build", tmp_path, "--target", *(f"{objects}/{name}.o" for name in sources if name.endswith(".cpp")))


def test_spilling_kernel_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "spill.cu").write_text(SPILLING)
    command = ["nvcc", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "spill.cu", "-o", "spill.cubin"]
    run(*command, cwd=tmp_path)
    done = subprocess.run([*command, *SPILL_CHECK], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Registers are spilled" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stem", KERNELS)
def test_source_compiles_for_every_architecture_without_spills(stem: str, tmp_path: Path) -> None:
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    options = "-std=c++17", "-O3", "-fatbin", "-Xptxas=-v"
    log = run("nvcc", *options, *targets, f"{stem}.cu", "-o", tmp_path / "out.fatbin", cwd=FOLDER)
    compiled = entries(log)
    for number in ARCHITECTURES:
        assert any(KERNELS[stem] in name and target == number for name, target in compiled), number
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert len(spills) == len(compiled)
    assert not any(spills)


@pytest.mark.slow
def test_library_builds_without_a_gpu_and_without_spills(tmp_path: Path) -> None:
    configure(tmp_path)
    run("cmake", "--build", tmp_path, "--target", "localllm_cuda")
    assert (tmp_path / "cuda" / "localllm_cuda.so").is_file()
