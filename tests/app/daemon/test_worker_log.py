"""The log of a worker: its file name, its lines, and a file that cannot be opened."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from localllm.app.daemon.worker_log import READ_BYTES, copy_output, log_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("some/model", "worker-some--model.log"),
        ("/a b/ü.1", "worker-a--b--.1.log"),
        ("../../etc/x", "worker-..--..--etc--x.log"),
        ("x" * 300, f"worker-{'x' * 100}.log"),
    ],
)
def test_log_name_has_the_safe_characters_of_the_model(model: str, name: str) -> None:
    assert log_name(model) == name


async def run_printer(text: str) -> asyncio.subprocess.Process:
    """A process that prints the value of a Python expression."""
    script = f"import sys; sys.stdout.write({text}); sys.stdout.flush()"
    return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", script, stdout=asyncio.subprocess.PIPE)


@pytest.mark.parametrize(
    ("text", "lines"),
    [("'a\\nb'", [1, 1]), ("'x' * 200 + '\\n'", [200]), ("'y' * 250_000", [])],
    ids=["no end of line", "line", "a line too long"],
)
async def test_log_has_all_output_of_the_worker(tmp_path: Path, text: str, lines: list[int]) -> None:
    process = await run_printer(text)
    assert process.stdout is not None
    await copy_output(process.stdout, tmp_path / "new", "m")
    await process.wait()
    lengths = [len(line) for line in (tmp_path / "new" / "worker-m.log").read_text().splitlines()]
    if lines:
        assert lengths == lines
    else:
        assert sum(lengths) == 250_000
        assert max(lengths) <= 2 * READ_BYTES


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("'2026-01-02 03:04:05,678 CRITICAL no memory\\n' * 2 + '2026-01-02 03:04:05,678 INFO bye\\n'", "no memory"),
        ("'2026-01-02 03:04:05,678 CRITICAL ' + 'x' * 1000 + '\\n'", "x" * 300),
        ("'2026-01-02 03:04:05,678 ERROR CRITICAL x\\nno CRITICAL x\\n'", ""),
    ],
    ids=["last", "long", "none"],
)
async def test_reason_of_a_crash_is_the_last_critical_line(tmp_path: Path, text: str, reason: str) -> None:
    process = await run_printer(text)
    assert process.stdout is not None
    assert await copy_output(process.stdout, tmp_path, "m") == reason
    await process.wait()


async def test_log_that_cannot_be_opened_does_not_block_the_worker(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = await run_printer("'x' * 200_000")
    assert process.stdout is not None
    await asyncio.wait_for(copy_output(process.stdout, tmp_path / "file", "m"), 100)
    assert await process.wait() == 0
