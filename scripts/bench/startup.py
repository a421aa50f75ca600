"""How long commands take to start, warm, and what they import. `python scripts/bench/startup.py [RUNS]`

Compares with the target of 100 ms for --help and with the bare interpreter.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = str(Path(sys.executable).with_name("localllm"))
COMMANDS = {
    "bare interpreter": [sys.executable, "-c", "pass"],
    "localllm --help": [PROGRAM, "--help"],
    "localllm run --help": [PROGRAM, "run", "--help"],
    "localllm serve --help": [PROGRAM, "serve", "--help"],
    "localllm config": [PROGRAM, "config"],
    "localllm list": [PROGRAM, "list"],
}
HEAVY = ("torch", "numpy", "textual", "httpx", "huggingface_hub", "rich", "asyncio", "msgspec")


def milliseconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return 1e3 * (time.perf_counter() - start)


def imported_at_help() -> list[str]:
    """Which heavy modules `localllm --help` loads."""
    code = "import sys; from localllm.app.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr.split()
    return [name for name in HEAVY if name in loaded]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    for name, command in COMMANDS.items():
        milliseconds(command)  # fills the file cache
        times = sorted(milliseconds(command) for _ in range(runs))
        print(f"{name:<24} median {statistics.median(times):6.1f} ms   p90 {times[int(runs * 0.9)]:6.1f} ms")
    print("heavy modules at --help:", ", ".join(imported_at_help()) or "none")


if __name__ == "__main__":
    main()
