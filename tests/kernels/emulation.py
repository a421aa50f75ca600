"""Compiles sources of GPU kernels as C++ and runs them on the CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NUMBERS = """
#include <cstdint>
#include <cstdio>
#include <cstring>
struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  explicit bfloat16(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    bits = uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
};
template <class V> V* read(const char* name, size_t count) {
  V* data = new V[count];
  FILE* file = fopen(name, "rb");
  if (!file || fread(data, sizeof(V), count, file) != count) throw name;
  return data;
}
"""


def compiler() -> str:
    """A C++ compiler. Without one the test is skipped."""
    return shutil.which("c++") or pytest.skip("no C++ compiler")


def execute(code: str, folder: Path, *flags: str) -> None:
    """Compile C++ that follows NUMBERS in `folder`, and run it there. It reads and writes its arrays in the folder."""
    (folder / "kernel.cpp").write_text(NUMBERS + code)
    subprocess.run([compiler(), "-O1", *flags, "-o", "kernel", "kernel.cpp"], cwd=folder, check=True)
    subprocess.run(["./kernel"], cwd=folder, check=True, env={"ASAN_OPTIONS": "detect_leaks=0"})
