"""Builds the environment of these tests in build/npu: torch_npu beside the packages of .venv, and the CANN libraries
that it loads. `python -m tests.npu.environment` builds what is missing and prints the variables of the environment.

The libraries are one file: the fake of fake_acl.c, and a stub for each other symbol that torch_npu needs. A stub ends
the process and prints its name.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "npu"
SITE = BUILD / "site"  # torch_npu, without its dependencies
LIBRARIES = BUILD / "cann"
HEADERS = SITE / "torch_npu/include/third_party/acl/inc"
VERSION = "2.13.0"  # of torch_npu, for the torch of the Makefile

# The names under which torch_npu loads CANN.
NAMES = "ascendcl hccl acl_op_compiler ge_runner graph acl_tdt_channel atb".split()


def is_installed() -> bool:
    return (SITE / f"torch_npu-{VERSION}.dist-info").exists()


def install() -> None:
    """Install torch_npu and PyYAML. pip finds them in its cache without a network."""
    if is_installed():
        return
    print(f"Installing torch_npu {VERSION} into {SITE.relative_to(ROOT)}.", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    new = SITE.with_name("site.new")  # an interrupted installation leaves no SITE
    shutil.rmtree(new, ignore_errors=True)
    subprocess.run([*command, "--target", str(new), f"torch_npu=={VERSION}", "pyyaml"], check=True, stdout=sys.stderr)
    shutil.rmtree(SITE, ignore_errors=True)
    new.rename(SITE)


def _symbols(library: Path, *options: str) -> set[str]:
    """The names of the dynamic symbols of a library, without versions. Weak undefined symbols are not needed."""
    output = subprocess.run(["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in output.splitlines()]
    return {fields[-1].partition("@")[0] for fields in lines if len(fields) > 1 and fields[-2] not in "wv"}


def _system() -> Iterator[Path]:
    """The loaded files of a process that has imported torch: torch, Python, the C library."""
    import torch  # noqa: F401

    maps = Path("/proc/self/maps").read_text().split("\n")
    for name in sorted({line.split(maxsplit=5)[5] for line in maps if line.count("/")}):
        if ".so" in name or name == os.path.realpath(sys.executable):
            yield Path(name)


def missing_symbols() -> set[str]:
    """The symbols that torch_npu needs and that neither it nor torch nor the system defines."""
    own = [SITE / "torch_npu" / "lib" / name for name in os.listdir(SITE / "torch_npu" / "lib")]
    users = [*own, *SITE.glob("torch_npu/_C*.so")]
    needed = set[str]().union(*(_symbols(library, "--undefined-only") for library in users))
    defined = set[str]().union(*(_symbols(library, "--defined-only") for library in [*own, *_system()]))
    return {name for name in needed - defined if not name.startswith("_ITM")}


def compile_libraries() -> Path:
    """Compile the fake and the stubs, and return the library."""
    library = LIBRARIES / "libascendcl.so"
    sources = hashlib.sha256((HERE / "fake_acl.c").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    stamp = LIBRARIES / "sources"
    if stamp.exists() and stamp.read_text() == sources:
        return library
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    compiler = ["gcc", "-std=gnu11", "-O1", "-g", "-fPIC", "-Wall", "-Werror", f"-I{HEADERS}"]
    fake = LIBRARIES / "fake_acl.o"
    subprocess.run([*compiler, "-c", str(HERE / "fake_acl.c"), "-o", str(fake)], check=True)
    stubs = LIBRARIES / "stubs.c"
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    names = sorted(missing_symbols() - _symbols_of_object(fake))
    lines += [f'void {name}(void) {{ fputs("CANN stub {name} was called\\n", stderr); abort(); }}' for name in names]
    stubs.write_text("\n".join(lines) + "\n")
    subprocess.run([*compiler, "-shared", str(fake), str(stubs), "-lpthread", "-o", str(library)], check=True)
    for name in NAMES[1:]:
        link = LIBRARIES / f"lib{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)
    stamp.write_text(sources)
    return library


def _symbols_of_object(file: Path) -> set[str]:
    output = subprocess.run(["nm", "--defined-only", str(file)], capture_output=True, text=True, check=True).stdout
    return {fields[-1] for fields in map(str.split, output.splitlines()) if fields[1] == "T"}


def variables() -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "startup", SITE, ROOT])),
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # `import torch` does not import torch_npu; the tests do
        "OMP_NUM_THREADS": "1",  # the tests run in several processes
        "TASK_QUEUE_ENABLE": "0",  # torch_npu calls ACL in the thread of the op
        "FAKE_ACL": "1",
    }


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    install()
    compile_libraries()
    for name, value in variables().items():
        print(f"export {name}={shlex.quote(value)}")
