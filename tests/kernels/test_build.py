"""Object code of the ISA variants: variants share no function, and no instruction is outside of its variant.

The linker keeps one copy of a weak function. If variants shared a function, the copy might use AVX-512, and every other
machine would stop at an illegal instruction.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from localllm.kernels.compiled.library import LibraryMissing, find_library

FORBIDDEN = {  # lane -> pattern of instructions and registers that its code must not have
    "generic": r"%[yz]mm|%k[0-7]\b|%tmm",
    "avx2": r"%zmm|%k[1-7]\b|%tmm|\{vex\}",
    "avxvnni": r"%zmm|%k[1-7]\b|%tmm",
    "avx512": r"%tmm",
}
TYPICAL = {"avx2": r"vfmadd\w+ .*%ymm", "avxvnni": r"\{vex\} vpdpbusd", "avx512": r"vdpbf16ps .*%zmm", "amx": r"tdpb"}


def lanes() -> dict[str, list[Path]]:
    """The object files of each variant in the build folder of a checkout; the key "" has the files without a
    variant."""
    try:
        folder = find_library().parent
        plan = (folder / "build.ninja").read_text()
    except (LibraryMissing, OSError):
        return {}
    found: dict[str, list[Path]] = {}
    for target, source in re.findall(r"^build CMakeFiles/(\w+)\.dir/(\S+\.o):", plan, re.MULTILINE):
        lane = "" if target == "localllm_cpu" else target
        found.setdefault(lane, []).append(folder / "CMakeFiles" / f"{target}.dir" / source)
    return found


def disassembled(objects: list[Path]) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", *objects]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


OBJECTS = lanes()
LANES = sorted(OBJECTS.keys() - {""})

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not OBJECTS, reason="no build folder beside the library"),
    pytest.mark.skipif(not (shutil.which("nm") and shutil.which("objdump")), reason="binutils are not installed"),
]


@pytest.mark.parametrize("lane", LANES)
def test_no_function_is_shared_between_variants(lane: str) -> None:
    for source in OBJECTS[lane]:
        names = subprocess.run(["nm", "-C", "--defined-only", source], capture_output=True, text=True, check=True)
        for line in names.stdout.splitlines():
            _, kind, name = line.split(maxsplit=2)
            if f"localllm::{lane}::" not in name:  # other variants may define it: the linker may take theirs
                assert kind.islower(), f"{source.name}: {name} ({kind}) is seen from outside the lane"
                assert kind not in "wvu", f"{source.name}: {name} is weak ({kind}), and not in the lane's namespace"


@pytest.mark.parametrize("lane", LANES)
def test_instructions_stay_in_their_variant(lane: str) -> None:
    code = disassembled(OBJECTS[lane])
    if lane in FORBIDDEN:
        strange = re.search(FORBIDDEN[lane], code)
        assert strange is None, code[max(0, strange.start() - 100) : strange.end() + 20]
    if lane in TYPICAL:
        assert re.search(TYPICAL[lane], code), "the lane's own instructions are used"


def test_other_code_runs_on_every_cpu() -> None:
    """Bindings, thread team and dispatch are not compiled for a variant."""
    assert not re.search(r"%[yz]mm|%tmm", disassembled(OBJECTS[""]))
