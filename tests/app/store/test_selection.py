"""The files of a repository that a download selects."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from localllm.app.errors import AppError, ModelNotFound, ModelUnusable
from localllm.app.store.names import HubName
from localllm.app.store.selection import gguf_quant, gguf_quants, select
from localllm.engine.files.weight_files import INDEX, SINGLE


@dataclass
class File:
    name: str
    size: int = 1


def files(names: list[str]) -> list[File]:
    return [File(name) for name in names]


REPO = HubName("org/x")
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
ASCEND_INDEX = "quant_model_weights.safetensors.index.json"
ASCEND_SHARDS = [f"quant_model_weights-0000{number}-of-00002.safetensors" for number in (1, 2)]
GGUFS = [
    "x-Q4_0.gguf",
    "x-Q4_K_M.gguf",
    "x-UD-Q4_K_XL.gguf",
    "x.bf16.gguf",
    "mmproj-F16.gguf",
    "Q8_0/x-Q8_0-00001-of-00002.gguf",
    "Q8_0/x-Q8_0-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("names", "kind", "chosen"),
    [
        (["config.json", SINGLE, "x.py", "model.bin"], "model", ["config.json", SINGLE]),
        (["config.json", "consolidated.safetensors", SINGLE], "model", ["config.json", SINGLE]),
        (
            ["config.json", "a.safetensors", INDEX, "LICENSE", "b/LICENSE", "b/model.safetensors"],
            "model",
            ["LICENSE", "config.json", INDEX, "a.safetensors"],
        ),
        (
            ["config.json", INDEX, *SHARDS, "model.fp16.safetensors", "pytorch_model.bin.index.json", "x-Q4_0.gguf"],
            "model",
            ["config.json", INDEX, *SHARDS],
        ),
        (["config.json", SINGLE, INDEX, *SHARDS], "model", ["config.json", SINGLE]),
        (
            ["adapter_config.json", "adapter_model.safetensors", "other.safetensors", "tokenizer.json"],
            "adapter",
            ["adapter_config.json", "adapter_model.safetensors"],
        ),
        (["adapter_config.json", "config.json", SINGLE], "model", ["adapter_config.json", "config.json", SINGLE]),
        (
            ["config.json", "quant_model_description.json", ASCEND_INDEX, *ASCEND_SHARDS, "rotation.safetensors"],
            "model",
            ["config.json", "quant_model_description.json", ASCEND_INDEX, *ASCEND_SHARDS],
        ),
    ],
)
def test_select_takes_one_format_and_the_small_files(names: list[str], kind: str, chosen: list[str]) -> None:
    selection = select(REPO, files(names))
    assert (selection.kind, [file.name for file in selection.files]) == (kind, chosen)
    assert selection.size == len(chosen)


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["config.json"], "no safetensors"),
        (["adapter_model.safetensors"], "no config.json"),
        (["config.json", "consolidated.safetensors"], "no model.safetensors or"),
        (["config.json", "b/model.safetensors"], "no safetensors"),
        (["config.json", "original/consolidated.00.pth"], "pickle"),
    ],
)
def test_repo_without_usable_weights_is_rejected_by_name(names: list[str], word: str) -> None:
    with pytest.raises(ModelUnusable, match=word):
        select(REPO, files(names))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        (HubName("org/x", quant="Q4_0"), ["x-Q4_0.gguf"]),
        (HubName("org/x", quant="Q4_K_M"), ["x-Q4_K_M.gguf"]),
        (HubName("org/x", quant="Q4_K_XL"), ["x-UD-Q4_K_XL.gguf"]),
        (HubName("org/x", quant="BF16"), ["x.bf16.gguf"]),
        (HubName("org/x", quant="Q8_0"), GGUFS[-2:]),
        (HubName("org/x", file="Q8_0/x-Q8_0-00002-of-00002.gguf"), GGUFS[-2:]),
        (HubName("org/x", file="x-Q4_0.gguf"), ["x-Q4_0.gguf"]),
    ],
)
def test_select_takes_one_gguf_model_with_all_shards(name: HubName, chosen: list[str]) -> None:
    selection = select(name, files(["README.md", "config.json", *GGUFS]))
    assert [file.name for file in selection.files] == ["README.md", *chosen]
    assert selection.kind == "gguf"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["config.json", "model.gguf"], ["model.gguf"]),
        (GGUFS, ["x-Q4_K_M.gguf"]),
        ([*GGUFS[-2:], "x-f16.gguf"], GGUFS[-2:]),  # the smallest
        ([SINGLE, "config.json", "x-Q4_K_M.gguf"], ["config.json", SINGLE]),
    ],
)
def test_name_without_a_selector_has_a_default_model(names: list[str], chosen: list[str]) -> None:
    sizes = {"x-f16.gguf": 3}
    selection = select(REPO, [File(name, sizes.get(name, 1)) for name in names])
    assert [file.name for file in selection.files] == chosen


@pytest.mark.parametrize(
    ("name", "names", "error", "word"),
    [
        (HubName("org/x", quant="Q4_K"), GGUFS, ModelNotFound, "no GGUF file Q4_K"),
        (HubName("org/x", quant="F16"), GGUFS, ModelNotFound, "no GGUF file F16"),
        (HubName("org/x", file="y.gguf"), GGUFS, ModelNotFound, "no GGUF file y.gguf"),
        (HubName("org/x", quant="Q8_0"), GGUFS[:-1], ModelUnusable, "lacks 1 of 2 shards"),
        (HubName("org/x", quant="Q4_0"), ["a-Q4_0.gguf", "b-Q4_0.gguf"], ModelUnusable, "selects 2 models"),
        (HubName("org/x"), ["a.gguf", "b.gguf"], ModelUnusable, "selects 2 models"),
        (HubName("org/x", file="b.safetensors"), ["config.json", SINGLE, "b.safetensors"], ModelNotFound, "b.safet"),
    ],
)
def test_selection_that_no_file_fits_is_an_error_with_a_hint(
    name: HubName, names: list[str], error: type[AppError], word: str
) -> None:
    with pytest.raises(error, match=word) as refused:
        select(name, files(names))
    assert refused.value.hint


def test_gguf_quantisations_are_read_from_file_names() -> None:
    assert gguf_quants(GGUFS) == ["BF16", "Q4_0", "Q4_K_M", "Q8_0", "UD-Q4_K_XL"]
    assert gguf_quant("Phi-3-mini-4k-instruct-q4.gguf") == "Q4"
    assert gguf_quant("qwen2.5-0.5b-instruct-iq3_xxs.gguf") == "IQ3_XXS"
    assert gguf_quant("model.gguf") == ""
