"""The register of the ops: definitions, implementations on each platform, and the capability that each set needs."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

from localllm.backends.platforms import kernel_sets
from localllm.kernels.ops import Ops
from localllm.kernels.ops.register import REFERENCES, KernelSet, Platform, register, usable


def test_register_has_the_implementations_of_every_platform() -> None:
    def fast(*arguments: object) -> None: ...

    own = dataclasses.replace(Ops(), norm=dataclasses.replace(Ops().norm, rms=fast))
    kernels = (KernelSet("fast", own, (8, 0)), REFERENCES)
    ops = register({"plain": Platform(Ops(), [REFERENCES]), "other": Platform(own, kernels)})
    rms = ops["norm.rms"]
    assert rms.native is rms.forward["plain"] is Ops().norm.rms
    assert rms.forward["other"] is fast
    assert (rms.source("plain"), rms.source("other")) == ("reference", "fast")
    assert rms.implementations == {"plain": (REFERENCES,), "other": kernels}
    assert ops["norm.add_rms"].implementations["other"] == (REFERENCES,)
    assert list(ops) == [name for name, _ in Ops()]
    assert usable(kernels, (8, 6)) == kernels
    assert usable(kernels, (7, 5)) == usable(kernels, ()) == (REFERENCES,)


WITHOUT_LIBRARY = """
from localllm.kernels.compiled import library

def missing():
    raise library.LibraryMissing("not built")

library.find_library = missing
from localllm.backends.cpu.device import DEVICE
from localllm.backends.platforms import kernel_sets
from localllm.kernels.ops import Ops

print([one.name for one in kernel_sets()["cpu"]], DEVICE.ops == Ops(), *DEVICE.warnings)
"""


def test_cpu_without_its_library_has_the_references_and_a_warning() -> None:
    """Any ISA variant of the library counts, not only AMX: without AMX the C++ kernels are faster than torch too."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, timeout=100)
    assert done.stdout == "['reference'] True the CPU kernels are not used (slower): not built\n", done.stderr


@pytest.mark.parametrize("platform", kernel_sets())
def test_ops_are_plain_functions(platform: str) -> None:
    """A step looks nothing up: a record of ops has the functions themselves."""
    kernels = kernel_sets()[platform]
    assert kernels[-1] == REFERENCES
    assert all(inspect.isfunction(op) for one in kernels for _, op in one.ops)
