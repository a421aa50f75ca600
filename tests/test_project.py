"""Files for contributors and users of the package: licences, types, the changelog, commit subjects."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from localllm.app.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LICENCES = dict(re.findall(r"^\| ([\w-]+) \| ([^|]+) \|", (ROOT / "THIRD-PARTY.md").read_text("utf-8"), re.MULTILINE))
FAMILIES = re.compile(r"Apache|BSD|BSL|MIT|MPL|GPL")


def requirements() -> set[str]:
    project = PROJECT["project"]
    lines = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        lines += extra
    return {re.split(r"[><=\[]", line)[0] for line in lines}


def declared(package: str) -> str:
    """The licence in the metadata of an installed package. Raises PackageNotFoundError."""
    fields = metadata.metadata(package)
    classifiers = [text for text in fields.get_all("Classifier") or () if text.startswith("License :: OSI Approved")]
    short = [
        text for text in (fields["License"] or "",) if len(text) < 40
    ]  # some packages have the complete licence text in this field
    return fields["License-Expression"] or " ".join(classifiers + short)


def test_every_dependency_has_an_import() -> None:
    folders = ("app", "backends", "engine", "kernels")
    texts = [file.read_text("utf-8") for folder in folders for file in (ROOT / folder).rglob("*.py")]
    imports = set(re.findall(r"^ *(?:import|from) (\w+)", "\n".join(texts), re.MULTILINE))
    owners = metadata.packages_distributions()
    packages = {package for module in imports for package in owners.get(module, ())}
    names = {re.split(r"[><=\[]", line)[0] for line in PROJECT["project"]["dependencies"] if ";" not in line}
    assert {name.replace("-", "_") for name in names} <= {package.lower().replace("-", "_") for package in packages}


def test_every_requirement_has_a_licence() -> None:
    assert LICENCES.keys() - {"Package", "---"} == requirements()


@pytest.mark.parametrize("package", sorted(requirements()))
def test_licences_are_those_of_the_installed_packages(package: str) -> None:
    try:
        licence = declared(package)
    except metadata.PackageNotFoundError:
        pytest.skip("not installed")
    assert set(FAMILIES.findall(LICENCES[package])) == set(FAMILIES.findall(licence))


@pytest.mark.parametrize("folder", ["app", "backends", "engine", "kernels"])
def test_every_package_has_a_py_typed_file(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()


def test_the_changelog_has_the_version() -> None:
    assert re.search(rf"^## {re.escape(VERSION)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("mlx: honour rope_parameters of transformers 5", ""),
        ('Revert "mlx: honour rope_parameters"', ""),
        ("mlx: " + "x" * 68, "73 characters"),
        ("honour rope_parameters", "name the part"),
    ],
)
def test_commit_subjects_are_short_and_name_the_part(subject: str, problem: str, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nThe reason.\n", "utf-8")
    done = subprocess.run([ROOT / "scripts/subjects", message], capture_output=True, text=True)
    assert (done.returncode != 0) == bool(problem)
    assert problem in done.stderr
