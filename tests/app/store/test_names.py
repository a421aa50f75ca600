"""The names of models and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.errors import InvalidRequest
from localllm.app.store.names import (
    FileAddress,
    HubName,
    LocalPath,
    Name,
    ShortName,
    adapter_name,
    parse,
    parse_hub,
    repo_of_folder,
    settings_names,
)

NAMES: list[tuple[str, Name]] = [
    ("guide", ShortName("guide")),
    ("qwen3:0.6b", ShortName("qwen3", "0.6b")),
    ("llama3.2:1b-q4", ShortName("llama3.2", "1b-q4")),
    ("gpt2@main", ShortName("gpt2", "", "main")),
    ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
    ("Qwen/Qwen3-0.6B@main", HubName("Qwen/Qwen3-0.6B", "main")),
    ("org/repo@refs/pr/1", HubName("org/repo", "refs/pr/1")),
    ("org/repo:Q4_K_M", HubName("org/repo", quant="Q4_K_M")),
    ("org/repo:q4_k_m", HubName("org/repo", quant="Q4_K_M")),
    ("org/repo:iq2_xxs", HubName("org/repo", quant="IQ2_XXS")),
    ("org/repo:ud-q4_k_xl", HubName("org/repo", quant="UD-Q4_K_XL")),
    ("org/repo@v1:bf16", HubName("org/repo", "v1", "BF16")),
    ("hf:org/repo", HubName("org/repo")),
    ("_org/_repo_", HubName("_org/_repo_")),
    ("ms:org/repo@v1", HubName("org/repo", "v1", hub="ms")),
    ("local/mine", HubName("local/mine")),
    ("https://huggingface.co/org/repo", HubName("org/repo")),
    ("https://huggingface.co/org/repo/tree/v1", HubName("org/repo", "v1")),
    ("https://hf.co/org/repo/resolve/main/q/m-Q4_0.gguf", HubName("org/repo", "main", file="q/m-Q4_0.gguf")),
    ("https://huggingface.co/org/repo/blob/v1/a.safetensors?x=1", HubName("org/repo", "v1", file="a.safetensors")),
    ("https://www.modelscope.cn/models/org/repo/summary", HubName("org/repo", hub="ms")),
    ("https://example.org/a/b.gguf", FileAddress("https://example.org/a/b.gguf", "b.gguf")),
    ("http://127.0.0.1:81/a%20b.GGUF?k=1", FileAddress("http://127.0.0.1:81/a%20b.GGUF?k=1", "a b.GGUF")),
    ("/models/m", LocalPath("/models/m")),
    ("./größe", LocalPath("./größe")),
    ("..", LocalPath("..")),
    ("~/m.gguf", LocalPath("~/m.gguf")),
]

HOSTILE = [
    "",
    " ",
    "a b",
    "x" * 5000,
    "-org/repo",
    "org/",
    "/".join("abc"),
    "org/..",
    "org/..m",
    "org/../../etc",
    "org/repo@../../x",
    "org/repo@a/../../b",
    "org/repo@a/./b",
    "org/repo@/etc",
    "org/repo@",
    "org/repo:",
    "org/repo:pirate",
    "org/repo:Q4_K_M:Q4_K_M",
    "org\\repo",
    "C:\\models\\m",
    "\\\\host\\share",
    "org/nul",
    "org--repo",
    "org/a--b",
    "con/repo",
    "aux",
    "NUL.txt",
    "qwen3:con",
    "org/repo@com1",
    "org/lpt9.gguf",
    "org/repo\x00",
    "org/repo\n",
    "org/re\x1b[2Jpo",
    "./a\x00b",
    "./a\nb",
    "оrg/repo",  # the first letter is Cyrillic
    "org/re\u202epo",
    "org\u2215repo",
    "org／repo",
    "org/repo\u200b",
    "qwen3:０.6b",
    "ftp://example.org/a.gguf",
    "file:///etc/passwd",
    "http://example.org/a.gguf",
    "https://",
    "https:///a.gguf",
    "https://example.org/",
    "https://example.org/a.bin",
    "https://example.org/../a.gguf",
    "https://example.org/%2e%2e/a.gguf",
    "https://example.org/a%2fb.gguf",
    "https://example.org/a%5cb.gguf",
    "https://example.org/a%00.gguf",
    "https://example.org/%ff.gguf",
    "https://example.org/nul.gguf",
    "https://user:secret@example.org/a.gguf",
    "https://example.org/a.gguf#x",
    "https://example.org\\@evil/a.gguf",
    "https://example.org:99999/a.gguf",
    "https://[::1/a.gguf",
    "https://huggingface.co/org",
    "https://huggingface.co/org/repo/resolve/main/pytorch_model.bin",
    "https://huggingface.co/org/repo/tree/a b",
    "hf:local/mine",
    "ms:qwen3",
    "HF:org/repo",
]


@pytest.mark.parametrize(("text", "name"), NAMES)
def test_parse_returns_the_parts_of_a_name(text: str, name: Name) -> None:
    assert parse(text) == name


@pytest.mark.parametrize("text", [text for text, name in NAMES if not (isinstance(name, HubName) and name.file)])
def test_text_of_a_name_is_the_same_name(text: str) -> None:
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_parse_refuses_malformed_and_hostile_names(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(text)
    assert refused.value.param == "model"
    assert refused.value.hint
    assert refused.value.message.isascii()
    assert refused.value.message.isprintable()


def test_every_repository_has_its_folder_in_the_store() -> None:
    folders = []
    for text, name in NAMES:
        if isinstance(name, HubName | FileAddress):
            assert name.folder.parent == paths.hub_cache_dir(), text
            folders.append(name.folder.name)
    assert {"models--org--repo", "models--ms--org--repo", "models--local--mine"} <= set(folders)
    assert repo_of_folder(Path("models--org--repo")) == "org/repo"
    assert repo_of_folder(Path("models--ms--org--repo")) == "ms:org/repo"
    assert repo_of_folder(Path("models--ms--phi")) == "ms/phi"
    assert repo_of_folder(Path("models--gpt2")) == "gpt2"


def test_file_addresses_have_names_that_parse() -> None:
    """Files of one name on two hosts have two folders."""
    one = FileAddress("https://a.example/x/My Model (1).gguf", "My Model (1).gguf")
    other = FileAddress("https://b.example/x/My Model (1).gguf", "My Model (1).gguf")
    assert one.folder != other.folder
    for address in (one, other, FileAddress("https://a.example/...gguf", "...gguf")):
        assert parse(address.repo) == HubName(address.repo)


def test_parse_hub_accepts_repositories_only() -> None:
    assert parse_hub("org/repo@v1") == HubName("org/repo", "v1")
    for text in ("guide", "qwen3:0.6b", "./m", "https://example.org/a.gguf"):
        with pytest.raises(InvalidRequest, match="is not the name of a repository"):
            parse_hub(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("steps", "steps"),
        ("org/lora", "lora"),
        ("org/lora@main", "lora"),
        ("org/lora-GGUF:F16", "lora-GGUF"),
        ("org/lora@v1:UD-Q4_K_XL", "lora"),
        ("/adapters/lora@v1", "lora@v1"),
        ("/adapters/lora-F16.gguf", "lora-F16"),
    ],
)
def test_adapter_has_the_last_part_of_its_id_as_name(text: str, name: str) -> None:
    assert adapter_name(text) == name


@pytest.mark.parametrize(
    ("id", "names"),
    [
        ("guide", ["guide"]),
        ("gpt2@v1", ["gpt2", "gpt2@v1"]),
        ("org/m", ["org/m"]),
        ("org/m@v2", ["org/m", "org/m@v2"]),
        ("org/m:Q8_0", ["org/m", "org/m:Q8_0"]),
        ("ms:org/m@v2:Q8_0", ["ms:org/m", "ms:org/m:Q8_0", "ms:org/m@v2", "ms:org/m@v2:Q8_0"]),
        ("/a@b/m-Q8_0.gguf", ["/a@b/m-Q8_0.gguf"]),
    ],
)
def test_names_with_settings_of_a_model(id: str, names: list[str]) -> None:
    assert settings_names(id) == names


def test_file_of_a_repository_has_the_settings_of_the_repository() -> None:
    for revision, repository in (("main", []), ("v2", ["org/m@v2"])):
        address = f"https://huggingface.co/org/m/resolve/{revision}/a/m-Q8_0.gguf"
        assert settings_names(address) == ["org/m", *repository, address]
