"""The machine that MLX runs on, without MLX."""

from __future__ import annotations

import subprocess

import psutil


def memory() -> tuple[int, int]:
    """(total, free) bytes of main memory, which Apple's GPUs share."""
    main = psutil.virtual_memory()
    return main.total, main.available


def apple_chip() -> str:
    """Its name, as "Apple M4 Pro"."""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "Apple silicon"
