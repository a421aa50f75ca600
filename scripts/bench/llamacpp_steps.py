"""llama.cpp on the same device, with random weights of the same shape and width, in another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from programs import Job, Program

HERE = Path(__file__).parent
OPTIONS: Mapping[str, object] = {"flash": True, "ubatch": 2048}  # the fastest on a large GPU
# Recipes of write_gguf.py, by the format
RECIPES = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_k_m", "fp8": "q8_0", "fp8_w8a8": "q8_0"}


class LlamaCpp:
    """A model of llama.cpp. Its steps draw no tokens; they copy the logits to the host, as llama-batched-bench does."""

    def __init__(self, shape: str, fmt: str, folder: Path, threads: int, gpu: bool) -> None:
        """`shape`: a name in SHAPES; `folder`: for the file of weights, which is deleted after the load."""
        recipe = RECIPES[fmt]
        self.label = f"llama.cpp {recipe}, flash attention on, micro-batches of {OPTIONS['ubatch']}"
        file = folder / f"{recipe}.gguf"
        command = [sys.executable, str(HERE / "write_gguf.py"), shape, recipe, str(file), "--random-blocks"]
        subprocess.run(command, check=True)
        settings = {"file": str(file), "threads": threads, "mmap": False, "gpu": gpu}
        try:
            self._program = Program("run_llamacpp.py", settings)
        finally:
            file.unlink()

    def steps(self, rows: int, context: int, count: int) -> float:
        """The mean time in seconds of `count` steps with a mean context of `context` tokens in each row."""
        job = Job("decode", rows, max(1, context - count // 2), count)
        return float(self._program.do(job, **OPTIONS)["seconds"]) / count

    def first_token(self, length: int) -> float:
        """Seconds to compute a prompt of `length` tokens."""
        return float(self._program.do(Job("prefill", 1, length), **OPTIONS)["seconds"])

    def close(self) -> None:
        self._program.__exit__(None, None, None)
