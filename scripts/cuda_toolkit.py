"""Makes a CUDA toolkit whose machine code and PTX load with the drivers of CUDA 12.8 and later.

The compiler of CUDA 13 writes both for the drivers of CUDA 13 only, and pip installs no complete compiler of CUDA 12.
So this toolkit has the front end of the installed nvcc, and the assembler (ptxas) of CUDA 12.8. Its `cicc` declares the
PTX version of CUDA 12.8; the assembler of CUDA 12.8 verifies that the PTX uses nothing newer.

    python -m scripts.cuda_toolkit FOLDER PTXAS    prints the path of nvcc
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

RELEASE = "12.8"
PTX_VERSION = "8.7"  # the PTX version of CUDA 12.8
CICC = """#!/bin/sh
# Compiles with the cicc of the installed toolkit. The last argument is the PTX file.
"{cicc}" "$@" || exit
for output; do :; done
sed -i 's/^\\.version .*/.version {version}/' "$output"
"""


def make_toolkit(folder: Path, nvcc: str, ptxas: Path) -> Path:
    """The nvcc of a new toolkit in `folder`. `nvcc`: the installed compiler, whose files the toolkit links to."""
    if release(nvcc) == RELEASE:
        return Path(shutil.which(nvcc) or nvcc)
    if release(ptxas) != RELEASE:
        raise SystemExit(f"error: {ptxas} is of CUDA {release(ptxas)}; {RELEASE} is needed")
    installed = _root(nvcc)
    shutil.rmtree(folder, ignore_errors=True)
    _link(installed, folder, except_for=("bin", "nvvm"))
    _link(installed / "bin", folder / "bin", except_for=("nvcc", "ptxas"))
    _link(installed / "nvvm", folder / "nvvm", except_for=("bin",))
    (folder / "nvvm" / "bin").mkdir()
    cicc = folder / "nvvm" / "bin" / "cicc"
    cicc.write_text(CICC.format(cicc=installed / "nvvm" / "bin" / "cicc", version=PTX_VERSION))
    cicc.chmod(0o755)
    # A copy, not a link: nvcc uses the tools beside its own file.
    shutil.copy2(installed / "bin" / "nvcc", folder / "bin" / "nvcc")
    (folder / "bin" / "ptxas").symlink_to(ptxas.resolve())
    return folder / "bin" / "nvcc"


def release(tool: str | Path) -> str:
    """The release of CUDA, such as 12.8, that nvcc or ptxas belongs to."""
    output = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", output)
    if match is None:
        raise SystemExit(f"error: {tool} --version names no release")
    return match[1]


def _root(nvcc: str) -> Path:
    """The folder of the installed toolkit: nvcc may be a link or a script."""
    done = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=True)
    match = re.search(r"^#\$ _HERE_=(.*)$", done.stderr, re.MULTILINE)
    if match is None:
        raise SystemExit(f"error: {nvcc} --dryrun does not name its folder")
    return Path(match[1]).resolve().parent


def _link(source: Path, target: Path, except_for: tuple[str, ...]) -> None:
    """Link the entries of `source` into the new folder `target`."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name not in except_for:
            (target / entry.name).symlink_to(entry.resolve())


if __name__ == "__main__":
    print(make_toolkit(Path(sys.argv[1]).resolve(), "nvcc", Path(sys.argv[2])))
