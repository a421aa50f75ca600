"""Commands with a real daemon, worker and runner, and the built-in model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.app.client import Done, Usage
from localllm.app.commands.selftest import _prefix, _same

from ..waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "localllm.app.cli"]
Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of all commands of this module, so that one daemon serves them."""
    home = tmp_path_factory.mktemp("shared")
    (home / "run").mkdir(mode=0o700)
    folders = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
    variables = {"HOME": str(home), "LOCALLLM_RUNTIME_DIR": str(home / "run"), "LOCALLLM_PORT": "0"}
    return {**os.environ, **folders, **variables, "LOCALLLM_BACKEND": "cpu", "LOCALLLM_THREADS": "1"}


@pytest.fixture(scope="module")
def localllm(environment: dict[str, str]) -> Iterator[Shell]:
    def run(*args: str, stdin: str | None = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *args], input=stdin, env=environment, capture_output=True, text=True, timeout=100
        )

    yield run
    stopped = run("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not list(Path(environment["LOCALLLM_RUNTIME_DIR"]).glob("*.sock"))


def test_run_gives_the_same_answer_as_text_and_json(localllm: Shell) -> None:
    text = localllm("run", "guide", "hello", "--temperature", "0", "--max-tokens", "12")
    assert text.returncode == 0, text.stderr
    as_json = localllm("run", "guide", "hello", "--temperature", "0", "--max-tokens", "12", "--json")
    answer = json.loads(as_json.stdout)
    assert text.stdout == answer["text"] + "\n"
    assert answer["finish"] in ("stop", "length")
    assert 0 < answer["usage"]["completion_tokens"] <= 12
    assert 0 < answer["timings"]["ttft"] <= answer["timings"]["seconds"]


def test_run_joins_argument_and_piped_text(localllm: Shell) -> None:
    def tokens(*args: str, stdin: str) -> int:
        done = localllm("run", "guide", *args, "--max-tokens", "1", "--json", stdin=stdin)
        return int(json.loads(done.stdout)["usage"]["prompt_tokens"])

    assert tokens("one two\n\nthree four", stdin="") == tokens("one two", stdin="three four\n")
    assert tokens(stdin="one two") < tokens("one two", stdin="three")
    nothing = localllm("run", "guide", stdin=" \n")
    assert nothing.returncode == 2
    assert "no prompt" in nothing.stderr


def test_run_in_a_shell_loop_answers_each_line_once(
    localllm: Shell, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text("one\ntwo\nthree\n")
    run = f'{shlex.join([*COMMAND, "run", "guide"])} "$line" --max-tokens 1 --json'
    loop = ["bash", "-c", f"while read -r line; do {run}; done < {tmp_path / 'lines'}"]
    done = subprocess.run(loop, env=environment, capture_output=True, text=True, timeout=100)
    assert [json.loads(line)["finish"] for line in done.stdout.splitlines()] == ["length"] * 3, done.stderr


def test_flags_of_a_call_belong_to_its_load_and_are_printed(localllm: Shell) -> None:
    ask = ("run", "guide", "hi", "--max-tokens", "1")
    localllm("stop", "guide")
    assert "loaded guide with --quant int8" in localllm(*ask, "--quant", "int8").stderr
    assert "loaded" not in localllm(*ask, "--quant", "int8").stderr
    assert "loaded guide again, with the settings of the daemon" in localllm(*ask).stderr
    assert "loaded" not in localllm(*ask).stderr
    assert "loaded guide again, with --context 512" in localllm(*ask, "--context", "512").stderr
    assert json.loads(localllm("ps", "--json").stdout)[0]["context"] == 512
    assert json.loads(localllm("config", "guide", "context=256", "--json").stdout)["settings"] == {"context": 256}
    assert "loaded guide again, with --context 256" in localllm(*ask).stderr
    localllm("config", "guide", "context=")
    localllm("stop", "guide")


def test_structured_output_fits_its_schema_and_pattern(localllm: Shell, tmp_path: Path) -> None:
    chosen = localllm("run", "guide", "yes or no?", "--regex", "yes|no", "--temperature", "1", "--seed", "7")
    assert chosen.stdout in ("yes\n", "no\n")
    schema = tmp_path / "schema.json"
    properties = {"ok": {"type": "boolean"}, "size": {"enum": [1, 2]}}
    schema_value = {
        "type": "object",
        "properties": properties,
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    schema.write_text(json.dumps(schema_value))  # with additional properties, a small model may use all its tokens
    filled = localllm("run", "guide", "fill it in", "--schema", str(schema), "--max-tokens", "600")
    value = json.loads(filled.stdout)
    assert isinstance(value["ok"], bool)
    assert value["size"] in (1, 2)


def test_flags_reach_the_sampler(localllm: Shell) -> None:
    hot = ("--temperature", "2", "--top-p", "1")  # at a lower temperature both seeds may give the same answer
    ask = ("run", "guide", "tell me a story", *hot, "--max-tokens", "24")
    assert localllm(*ask, "--seed", "1").stdout == localllm(*ask, "--seed", "1").stdout
    assert localllm(*ask, "--seed", "1").stdout != localllm(*ask, "--seed", "2").stdout


def test_chat_without_a_terminal_answers_each_line(localllm: Shell) -> None:
    done = localllm("chat", "--max-tokens", "8", "--temperature", "0", stdin="hello\n\nhow are you?\n")
    assert done.returncode == 0, done.stderr
    alone = localllm("chat", "--max-tokens", "8", "--temperature", "0", stdin="hello\n")
    assert done.stdout.startswith(alone.stdout)
    assert len(done.stdout) > len(alone.stdout)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("run", "guid", "hi"), 3, "did you mean guide?"),
        (("run", "guide", "hi", "--temperature", "-1"), 2, "temperature"),
        (("run", "guide", "hi", "--max-tokens", "100000"), 2, "2048"),
        (("run", "guide", "hi", "--regex", "("), 2, "error: "),
        (("stop", "org/none"), 3, "not loaded"),
    ],
)
def test_errors_of_the_daemon_keep_their_exit_codes(
    localllm: Shell, args: tuple[str, ...], code: int, says: str
) -> None:
    done = localllm(*args)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_input_that_is_not_utf8_is_rejected(environment: dict[str, str]) -> None:
    done = subprocess.run([*COMMAND, "run", "guide"], input=b"\xff\xfe", env=environment, capture_output=True)
    assert done.returncode == 2
    assert b"standard input is not UTF-8 text" in done.stderr


def test_ps_shows_loaded_models(localllm: Shell) -> None:
    localllm("run", "guide", "hi", "--max-tokens", "1")
    [model] = [entry for entry in json.loads(localllm("ps", "--json").stdout) if entry["id"] == "guide"]
    assert (model["state"], model["backend"]) == ("ready", "cpu")
    assert re.search(r"guide +ready +cpu", localllm("ps").stdout)
    assert "running, loaded: guide" in localllm("doctor").stdout


def test_ctrl_c_stops_the_answer_but_not_the_daemon(localllm: Shell, environment: dict[str, str]) -> None:
    command = [
        *COMMAND,
        "run",
        "guide",
        "go on",
        "--temperature",
        "1",
        "--max-tokens",
        "1900",
        "--regex",
        "[a-z ]{6000}",
    ]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(1), "the answer has started"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err.strip() == ""
    wait_until(lambda: not json.loads(localllm("ps", "--json").stdout)[0]["requests"])  # of the closed connection


def test_bench_prints_results_as_json(localllm: Shell) -> None:
    done = localllm("bench", "--rounds", "1", "--together", "2", "--together", "5", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["backend"] == "cpu"
    assert result["prompt_tokens"] > 300
    for name in ("ttft_ms", "prefill", "decode", "memory_gbps", "memory_share"):
        assert result[name] > 0, name
    assert list(result["throughput"]) == ["2", "5"]
    assert all(rate > 0 for rate in result["throughput"].values())


def test_bench_fits_a_short_context(localllm: Shell) -> None:
    localllm("config", "guide", "context=96")
    done = localllm("bench", "--rounds", "1", "--together", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 8 < result["prompt_tokens"] < 96
    assert result["prefill"] > 0
    localllm("config", "guide", "context=")
    localllm("run", "guide", "hello", "--max-tokens", "1")  # loads the model with the usual settings


def test_bench_shows_a_table(localllm: Shell) -> None:
    done = localllm("bench", "--rounds", "1", "--together", "3")
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"guide on .+ \(cpu, (float32|bfloat16)\), medians of 1 rounds", title)
    words = ["time to first token", "prefill", "decode, 1 answer", "decode, 3 answers", "memory"]
    assert [line[2:23].rstrip() for line in lines] == words
    figures = [re.match(r" *([\d.]+) (ms|tokens/s|GB/s)", line[23:]) for line in lines]
    assert all(figure and float(figure[1]) > 0 for figure in figures)
    assert done.stderr.splitlines() == ["round 1 of 1", "measuring the read bandwidth of the memory"]


def test_stop_unloads_one_model(localllm: Shell) -> None:
    localllm("run", "guide", "hi", "--max-tokens", "1")
    assert localllm("stop", "guide").returncode == 0
    assert json.loads(localllm("ps", "--json").stdout) == []


def test_selftest_passes(localllm: Shell) -> None:
    done = localllm("selftest", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["backend"] == "cpu"
    assert len(report["checks"]) == 6
    assert all(check["ok"] for check in report["checks"]), report


def test_selftest_reports_a_wrong_answer() -> None:
    assert _same("known", ["a", "b "], ["a", "b"]).ok
    check = _same("known", ["a", "c"], ["a", "b"])
    assert (check.ok, check.details) == (False, "1 of 2 differ; the first is 'c', expected 'b'")


def test_selftest_reports_a_wrong_answer_from_the_prefix_cache() -> None:
    class Wrong:
        async def ask(self, prompt: str, earlier: Any, **parameters: Any) -> tuple[str, Done]:
            return "c", Done(finish="stop", usage=Usage(prompt_tokens=9, cached_tokens=8), ttft=0.0, seconds=0.0)

    check = asyncio.run(_prefix(Wrong(), "?", "b", [], {}))  # type: ignore[arg-type]
    assert (check.ok, check.details) == (False, "8 of 9 tokens reused; 1 of 1 differ; the first is 'c', expected 'b'")
