"""Writes the generated tables of docs/**/*.md. `python scripts/tables.py [--check]`

A table is between `<!-- table: NAME -->` and `<!-- end -->`. --check changes no file; the exit code is 1 if a table is
stale.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click

from localllm.app import config
from localllm.app.chat.calls.records import FORMATS
from localllm.app.chat.calls.writing import example
from localllm.app.cli import EPILOG, SECTIONS, cli
from localllm.app.developer import Developer
from localllm.backends import ORDER, load
from localllm.engine.files.multimodal import TEXT_MODELS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.results import Record, read  # noqa: E402

REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

HARDWARE = {
    "cuda": "NVIDIA GPU (CUDA)",
    "hip": "AMD GPU (ROCm)",
    "npu": "Huawei Ascend NPU",
    "xpu": "Intel GPU",
    "mlx": "Apple silicon (MLX)",
    "cpu": "CPU",
    "llamacpp": "GGUF models (llama.cpp)",
}
# (backend, implementation of the ops) -> description
IMPLEMENTATIONS = {
    ("cuda", "library"): "with the C++ kernels",
    ("cuda", "triton"): "with Triton alone",
    ("cuda", "references"): "with torch alone",
    ("cpu", "references"): "with torch alone",
}
LESSER = {
    "emulated": "on an emulator",
    "compile": "only compiled",
    "contract": "without a device, with the schemas of the vendor",
}
NOT_YET = "Not supported yet; `localllm doctor` detects it"


def state(records: list[Record]) -> str:
    """The state of one backend: a claim for each machine and implementation, from the results of the tests."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.passed or record.failed:
            groups.setdefault((record.tier, record.machine, record.lane), []).append(record)
    claims = [_claim(*group, results) for group, results in sorted(groups.items()) if group[0].startswith("real")]
    if all(tier != "real" for tier, _, _ in groups):
        claims.append("Never run on this hardware")
        claims += [_lesser(tier, records) for tier in LESSER if any(record.tier == tier for record in records)]
    return ". ".join(claims)


def _claim(tier: str, machine: str, implementation: str, records: list[Record]) -> str:
    backend = records[0].backend
    where = machine
    if implementation:
        where += " " + IMPLEMENTATIONS.get((backend, implementation), f"({implementation})")
    passed = sum(record.passed for record in records)
    failed = sum(record.failed for record in records)
    when = _when(records)
    if failed:
        return f"**Fails** on {where}: {failed} of {passed + failed} tests{when}"
    # Other files run the suite with other settings, such as captured steps.
    suite = [record for record in records if record.suite and record.file == f"tests/backends/test_{backend}.py"]
    count = sum(record.passed for record in suite)
    others = passed - count
    if not count:
        return f"Partly tested on {where}: {passed} tests passed, without the conformance suite{when}"
    skipped = sum(record.skipped for record in suite)
    tests = f"{count} tests" + (f", {skipped} skipped" if skipped else "")
    more = f" and {others} other tests" if others else ""
    return f"Verified on {where}: the conformance suite ({tests}){more} passed{when}"


def _when(records: list[Record]) -> str:
    dates = sorted({record.date for record in records})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    earlier = sum(not record.is_current for record in records)
    if not earlier:
        return f" ({days})"
    which = "" if earlier == len(records) else f"{earlier} of {len(records)} test files "
    return f" ({days}, {which}with an earlier version of the sources)"


def _lesser(tier: str, records: list[Record]) -> str:
    """The claim of a tier without the hardware. Every machine runs the same tests, so the largest count is given."""
    results = [record for record in records if record.tier == tier]
    machines: Counter[str] = Counter()
    for record in results:
        machines[record.machine] += record.passed
    passed = max(machines.values())
    failed = sum(record.failed for record in results)
    return f"{f'**{failed} tests failed** and ' if failed else ''}{passed} tests passed {LESSER[tier]}"


def support() -> str:
    current = [record for record in read() if (ROOT / record.file).exists()]
    rows = []
    for name in ORDER:
        records = [record for record in current if record.backend == name]
        runs = "open" in dir(load(name))
        rows.append((HARDWARE[name], f"`{name}`", state(records) if runs else NOT_YET))
    return _table(("Hardware", "Backend", "State"), rows)


def commands() -> str:
    rows = []
    for section, names in SECTIONS.items():
        for name in names:
            command = cli.commands[name]
            usage = " ".join(command.collect_usage_pieces(click.Context(command)))
            usage = re.sub(r"\[OPTIONS\] ?|\[COMMAND\] \[ARGS\]\.\.\.", "", usage)
            leaves = command.commands.values() if isinstance(command, click.Group) else [command]
            has_json = "yes" if any(param.name == "as_json" for leaf in leaves for param in leaf.params) else ""
            rows.append((section, f"`{f'localllm {name} {usage}'.strip()}`", command.get_short_help_str(100), has_json))
    return _table(("Section", "Command", "What it does", "`--json`"), rows)


def exit_codes() -> str:
    rows = re.findall(r"(\d+) ([^,]+)", " ".join(EPILOG.partition("Exit codes: ")[2].split()))
    return _table(("Code", "Meaning"), rows)


def settings() -> str:
    rows = [(f"`{setting.name}`", _default(setting), setting.meaning) for setting in config.describe()]
    return _table(("Setting", "Default", "Meaning"), rows)


def developer() -> str:
    rows = [(f"`{option.env}`", _default(option), option.meaning) for option in config.describe(Developer)]
    return _table(("Variable", "Default", "Meaning"), rows)


def _default(setting: config.Setting) -> str:
    return "" if setting.default in ("", ()) else f"`{setting.default}`"


def architectures() -> str:
    names = sorted(file.stem for file in (ROOT / "backends/pytorch/models").glob("[!_]*.py"))
    text = ", ".join(f"`{name}`" for name in sorted(TEXT_MODELS))
    return ", ".join(f"`{name}`" for name in names) + f". Of multimodal models only the text model: {text}"


def formats() -> str:
    """The formats of tool calls, each with a call as a model writes it; ↵ is a line break."""
    calls = [("get_weather", {"city": "Oslo", "days": 3})]
    return _table(("Format", "A call"), [(form.title, _code(example(form, calls))) for form in FORMATS])


def _code(text: str) -> str:
    """A text as code on one line."""
    fence = "`````" if "`" in text else "`"
    space = " " if "`" in text else ""
    return fence + space + text.replace("\n", "↵") + space + fence


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "support": support,
    "commands": commands,
    "exit_codes": exit_codes,
    "settings": settings,
    "developer": developer,
    "architectures": architectures,
    "formats": formats,
}


def main() -> int:
    stale = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text("utf-8")
        after = REGION.sub(lambda match: match[1] + TABLES[match[2]]() + "\n" + match[3], before)
        if after != before:
            stale.append(page)
            if "--check" not in sys.argv[1:]:
                page.write_text(after, "utf-8")
    if "--check" not in sys.argv[1:]:
        return 0
    for page in stale:
        print(f"{page.relative_to(ROOT)} has stale tables: run python scripts/tables.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
