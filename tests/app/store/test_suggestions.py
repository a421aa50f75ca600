"""Hints about names that are not on this machine: similar names, on every command."""

from __future__ import annotations

import pytest

from localllm.app.cli import main
from localllm.app.store import preferences, suggestions
from localllm.app.store.local import snapshots

from .local.test_snapshots import ADAPTER, WHOLE, make

# The commands that take the name of a model and need no daemon. {} is the name.
COMMANDS = [
    "show {}",
    "inspect {}",
    "fit {}",
    "rm {} --yes",
    "verify {}",
    "pull {} --yes",
    "alias mine {}",
    "config {}",
]
ADAPTER_COMMANDS = ["show {}", "inspect {}", "verify {}", "rm {} --yes", "adapters rm {} --yes", "adapters load {}"]


def hint_of(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([word.replace("{}", name) for word in command.split()]) != 0
    return capsys.readouterr().err.partition("hint: ")[2]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["guid", "Guide", "guidee", "guid:1b"])
def test_every_command_suggests_a_similar_model(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "guide" in hint_of(command, name, capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_suggests_a_similar_repository(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    make("org/whole-model", WHOLE)
    if command.startswith(("pull", "inspect", "fit")):
        return  # these ask the hub about a repository: see test_hub_error_suggests_a_repository_of_the_catalog
    if command.startswith("alias"):
        return  # an alias may be the name of a model that is not on this machine yet
    assert "did you mean org/whole-model?" in hint_of(command, "org/whole-modle", capsys)


@pytest.mark.parametrize("command", ADAPTER_COMMANDS)
def test_every_command_suggests_a_similar_adapter(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    make("org/pirate-lora", ADAPTER)
    assert "org/pirate-lora" in hint_of(command, "pirate-lora", capsys)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen/Qwen3-0.6", "did you mean Qwen/Qwen3-0.6B? to download it: localllm pull Qwen/Qwen3-0.6"),
        ("qwen/qwen3-0.6b", "did you mean Qwen/Qwen3-0.6B?"),
        ("Qwen/Qwen3-0.6B", "to download it: localllm pull Qwen/Qwen3-0.6B"),
        ("org/other", "to download it: localllm pull org/other"),
        ("qwen", "qwen3:0.6b"),
        ("lama3.2:1b", "llama3.2:1b"),
        ("smal", "did you mean small?"),
        ("local/mein", "did you mean local/mine?"),
        ("local/other", "localllm list shows"),
        ("https://example.org/a.gguf", "localllm list shows"),
        ("a b", "for example qwen3:0.6b"),
    ],
)
def test_hint_names_the_model_that_the_user_may_mean(name: str, words: str) -> None:
    make("local/mine", WHOLE)
    preferences.set_alias("small", "Qwen/Qwen3-4B")
    assert words in suggestions.hint(name, [ref.id for ref in snapshots.available()])


def test_sizes_of_the_catalog_are_called_approximate(capsys: pytest.CaptureFixture[str]) -> None:
    assert "approximate sizes" in hint_of("pull {}", "qwen3", capsys)
    main(["search", "qwen3:0.6b", "--offline"])
    assert "about 1.5 GB" in capsys.readouterr().out


def test_list_without_downloads_suggests_a_short_name_and_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().err
    assert "localllm pull qwen3:0.6b" in text
    assert "localllm search" in text


def test_name_of_a_gguf_file_may_be_a_wrong_path() -> None:
    assert suggestions.hint("models/m.gguf", []) == "no file has this path; to download it: localllm pull models/m.gguf"
