"""Writes the generated tables of docs/**/*.md. `python scripts/tables.py [--check]`

A table is between `<!-- table: NAME -->` and `<!-- end -->`. --check changes no file; the exit code is 1 if a table is
stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from localllm.app import config
from localllm.app.api import ignored
from localllm.app.chat.calls.records import FORMATS
from localllm.app.chat.calls.writing import example
from localllm.app.cli import EPILOG, SECTIONS, cli
from localllm.app.developer import Developer
from localllm.backends import ORDER
from localllm.engine.files.multimodal import TEXT_MODELS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import hardware  # noqa: E402
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
# Backend -> what stands in for its hardware in the tests
STAND_INS = {"npu": "no NPU: torch_npu 2.13 over a fake of CANN"}
# Implementation of the ops -> description
IMPLEMENTATIONS = {"library": "C++ kernels", "triton": "Triton alone", "references": "torch alone"}


def support() -> str:
    records = [record for record in read() if (ROOT / record.file).exists()]
    rows = []
    for name in ORDER:
        own = rows_of([record for record in records if record.backend == name])
        rows += [(HARDWARE[name], f"`{name}`", *cells) for cells in own or [("no", "", "", "", "")]]
    return _table(("Hardware", "Backend", "State", "Tested on", "Conformance suite", "Other tests", "Date"), rows)


def rows_of(records: list[Record]) -> list[tuple[str, ...]]:
    """A row for each machine and implementation of one backend that ran tests: state, machine, tests of the suite,
    other tests, dates. Tests without any hardware of a backend count only if it has a stand-in."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.tier.startswith("real"):
            groups.setdefault((record.machine, record.lane), []).append(record)
        elif record.backend in STAND_INS:
            groups.setdefault((STAND_INS[record.backend], ""), []).append(record)
    return [_row(*group, own) for group, own in sorted(groups.items()) if _ran(own)]


def _row(machine: str, implementation: str, records: list[Record]) -> tuple[str, ...]:
    # Other files run the suite with other settings, such as captured steps.
    suite = [record for record in records if record.suite and record.file.endswith(f"test_{record.backend}.py")]
    others = [record for record in records if record not in suite]
    where = ", ".join(filter(None, (machine, IMPLEMENTATIONS.get(implementation, implementation))))
    dates = sorted({record.date for record in records})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    if not all(record.is_current for record in records):
        when += ", of an earlier version"
    return _state(suite, records), where, _counts(suite), _counts(others), when


def _state(suite: list[Record], records: list[Record]) -> str:
    if any(record.failed for record in records):
        return "**fails**"
    if any(record.tier != "real" for record in records):
        return "untested"
    return "verified" if _ran(suite) else "partly"


def _ran(records: list[Record]) -> bool:
    return any(record.passed + record.failed for record in records)


def _counts(records: list[Record]) -> str:
    """The numbers of tests that passed, failed and were skipped, without those that are 0."""
    names = ("passed", "failed", "skipped")
    totals = {name: sum(getattr(record, name) for record in records) for name in names}
    return ", ".join(f"{count} {name}" for name, count in totals.items() if count)


def ops() -> str:
    header, *rows = hardware.ops()
    return _table(header, rows)


def devices() -> str:
    records = [record for record in read() if (ROOT / record.file).exists()]
    states = {name: [row[0] for row in rows_of([one for one in records if one.backend == name])] for name in ORDER}
    header, *rows = hardware.devices({name: (own or ["no tests ran"])[0] for name, own in states.items()})
    return _table(header, rows)


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


def ignored_fields() -> str:
    return _table(("Field", "Why it has no effect"), [(f"`{path}`", why) for path, why in ignored.table().items()])


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
    "ops": ops,
    "devices": devices,
    "commands": commands,
    "exit_codes": exit_codes,
    "settings": settings,
    "developer": developer,
    "ignored_fields": ignored_fields,
    "architectures": architectures,
    "formats": formats,
}


def main() -> int:
    hardware.with_stand_ins()
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
