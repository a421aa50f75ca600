"""The catalog of short names, the aliases, and the meaning of a name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.errors import ConfigError, InvalidRequest, ModelNotFound
from localllm.app.store import catalog, preferences, resolved
from localllm.app.store.hub import targets
from localllm.app.store.names import HubName, LocalPath, ShortName, parse

from .local.test_snapshots import CONFIG, WHOLE, make


def write_catalog(text: str) -> None:
    file = paths.user_catalog_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_every_bundled_entry_is_complete() -> None:
    entries = catalog.entries()
    assert len(entries) >= 30
    for name, entry in entries.items():
        short = parse(name)
        assert isinstance(short, ShortName), name
        assert short.tag, name
        assert entry.licence, name
        assert 0 < entry.size < entry.memory, name
        assert bool(entry.target.quant) == ("gguf" in entry.formats), name
    assert entries["qwen3:0.6b"].target == HubName("Qwen/Qwen3-0.6B")
    assert entries["llama3.2:1b-q4"].target.quant == "Q4_K_M"


def test_short_name_is_the_model_of_its_repository() -> None:
    with pytest.raises(ModelNotFound) as missing:
        resolved.model("qwen3:0.6b")
    assert missing.value.hint == "to download it: localllm pull qwen3:0.6b"
    make("Qwen/Qwen3-0.6B", WHOLE)
    assert resolved.model("qwen3:0.6b").id == resolved.model("QWEN3:0.6B").id == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3", "approximate sizes: qwen3:0.6b (1.5 GB), qwen3:"),
        ("qwen3:0.7b", "qwen3:0.6b"),
        ("qwn3:0.6b", "qwen3:0.6b"),
        ("nothing", "localllm search"),
    ],
)
def test_unknown_short_name_gets_similar_names(name: str, words: str) -> None:
    with pytest.raises(ModelNotFound) as unknown:
        targets.remote_name(name)
    assert words in unknown.value.hint
    with pytest.raises(ModelNotFound) as missing:
        resolved.model(name)
    assert words.partition(" (")[0] in missing.value.hint


def test_remote_name_is_the_repository_to_download() -> None:
    preferences.set_alias("small", "Qwen/Qwen3-0.6B@v1")
    preferences.set_alias("tiny", "qwen3:0.6b")
    assert targets.remote_name("Qwen3:0.6b") == HubName("Qwen/Qwen3-0.6B")
    assert targets.remote_name("small") == HubName("Qwen/Qwen3-0.6B", "v1")
    assert targets.remote_name("tiny") == HubName("Qwen/Qwen3-0.6B")
    assert targets.remote_name("org/repo") == HubName("org/repo")
    for name in ("guide", "./folder"):
        with pytest.raises(InvalidRequest):
            targets.remote_name(name)
    with pytest.raises(ModelNotFound, match="belong to imported models"):
        targets.remote_name("local/mine")


def test_user_catalog_adds_and_replaces_entries() -> None:
    write_catalog(
        '["Mine:1b"]\nrepository = "org/mine"\n["qwen3:0.6b"]\nrepository = "ms:Qwen/Qwen3-0.6B"\nrevision = "v1"'
    )
    assert catalog.find("mine:1B") is not None
    assert catalog.entries()["qwen3:0.6b"].target == HubName("Qwen/Qwen3-0.6B", "v1", hub="ms")
    assert "llama3.2:1b" in catalog.entries()
    write_catalog('["other:1b"]\nrepository = "org/mine"')
    assert catalog.find("mine:1b") is None, "a changed file is read again"


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "x = 1",
        '["a:b"]\nlicence = "mit"',
        '["a:b"]\nrepository = "org/x"\nsizes = 1',
        '["a:b"]\nrepository = "org/x"\nsize = -1',
        '["a:b"]\nrepository = "../x"',
        '["a:b"]\nrepository = "org/x"\nrevision = "../../x"',
        '["org/x"]\nrepository = "org/x"',
        '["guide:x"]\nrepository = "org/x"',
        '["a:b"]\nrepository = "https://example.org/a.gguf"',
        b"\xff",
    ],
)
def test_malformed_user_catalog_is_an_error_that_names_the_file(text: str | bytes) -> None:
    write_catalog("")
    paths.user_catalog_file().write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"catalog\.toml"):
        catalog.entries()
    assert resolved.model("guide").bundled, "the built-in model needs no catalog"


def test_alias_is_another_name_of_a_model(tmp_path: Path) -> None:
    make("org/whole", WHOLE)
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "model.safetensors").write_text("w")
    preferences.set_alias("mine", "org/whole")
    preferences.set_alias("mine:path", str(tmp_path))
    preferences.set_alias("loop", "mine")
    assert resolved.model("mine").id == "org/whole"
    assert resolved.model("mine:path").path == tmp_path
    assert catalog.expand(parse("loop")) == ShortName("mine"), "an alias of an alias is not followed"
    preferences.set_alias("mine", None)
    with pytest.raises(ModelNotFound):
        resolved.model("mine")
    assert resolved.model("mine:path").path == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFound) as missing:
        resolved.model("mine:path")
    assert "is an alias of" in missing.value.hint


def test_alias_precedes_the_catalog_but_not_the_built_in_model() -> None:
    make("org/whole", WHOLE)
    preferences.set_alias("guide", "org/whole")
    preferences.set_alias("qwen3:0.6b", "org/whole")
    assert resolved.model("guide").bundled
    assert resolved.model("qwen3:0.6b").id == "org/whole"
    assert catalog.expand(parse("./guide")) == LocalPath("./guide")


@pytest.mark.parametrize(
    "alias", ["guide", "guide:x", "org/repo", "qwen3:0.6b", "./x", "a@b", "a b", "..", "hf:x", "nul"]
)
def test_alias_must_not_hide_another_name(alias: str) -> None:
    with pytest.raises(InvalidRequest):
        catalog.check_alias(alias)
    assert catalog.check_alias("mine:1b") == "mine:1b"


def test_preferences_survive_any_text_and_are_read_again() -> None:
    assert preferences.read() == preferences.Preferences()
    preferences.set_alias("a", './a "b" \\ ü')
    preferences.set_settings("org/x", {"quant": "int4", "context": 8192, "rope_scale": 0.5})
    preferences.set_settings('./path with "quotes"', {"quant": "int8"})
    assert preferences.read().aliases == {"a": './a "b" \\ ü'}
    assert preferences.read().settings["org/x"] == {"quant": "int4", "context": 8192, "rope_scale": 0.5}
    assert preferences.read().settings['./path with "quotes"'] == {"quant": "int8"}
    preferences.set_settings("org/x", {})
    assert list(preferences.read().settings) == ['./path with "quotes"']
    paths.models_file().write_text("aliases = 3")
    with pytest.raises(ConfigError, match=r"models\.toml"):
        preferences.read()


def test_changes_at_the_same_time_are_all_kept() -> None:
    """The routes of the daemon and the commands change the file in threads and processes."""
    numbers = range(40)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: preferences.set_alias(f"alias{number}", "guide"), numbers))
    assert preferences.read().aliases == {f"alias{number}": "guide" for number in numbers}
