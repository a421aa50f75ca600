"""README and docs agree with the program: commands, flags, tables, links, files and ports."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from localllm.app import config
from localllm.app.cli import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
README = (ROOT / "README.md").read_text("utf-8")


def test_generated_tables_are_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    blocks = "\n".join(text.split("```")[1::2])
    used = re.findall(r"^localllm ([a-z]+)(.*)$", blocks, re.MULTILINE)
    used += re.findall(r"`localllm ([a-z]+)([^`\n]*)`", text)
    for name, rest in used:
        command = cli.commands[name]
        if isinstance(command, click.Group) and rest.split():
            command = command.commands[rest.split()[0]]
        valid_flags = {
            flag
            for param in command.get_params(click.Context(command, help_option_names=["-h", "--help"]))
            for flag in param.opts
        }
        for flag in re.findall(r"--[a-z-]+", rest.partition("#")[0]):
            assert flag in valid_flags, f"localllm {command.name} {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        assert (page.parent / link).exists(), link
        assert not anchor or anchor in headings(page.parent / link if link else page), f"{link}#{anchor}"
    for path in re.findall(r"`((?:app|engine|backends|kernels|scripts|tests|assets|docs)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path


def headings(page: Path) -> set[str]:
    """The anchors of a page, as sites make them from its headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


def test_the_pages_have_the_default_port() -> None:
    for page in PAGES:
        assert set(re.findall(r"127\.0\.0\.1:(\d+)", page.read_text("utf-8"))) <= {str(config.DEFAULT_PORT)}, page


def test_readme_fits_on_a_few_screens() -> None:
    assert 700 <= len(README.split()) <= 900


def test_every_dependency_is_pinned_to_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()[1:])
    names = {re.split(r"[><=\[]", requirement)[0].replace("_", "-").lower() for requirement in requirements}
    assert names <= set(pins)
    assert f"torch=={pins['torch']}" in (ROOT / "Makefile").read_text("utf-8")


def test_glossary_is_short_and_sorted() -> None:
    glossary = (ROOT / "docs/develop/glossary.md").read_text("utf-8")
    terms = re.findall(r"^\| ([^|]+?) \|", glossary, re.MULTILINE)[2:]
    assert terms == sorted(set(terms), key=str.lower)
    assert len(terms) <= 50
