"""The tokenizer files of a model folder, merged, against AutoTokenizer of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from localllm.app.chat.tokenizer import classes
from localllm.app.chat.tokenizer.classes import AS_STORED, BUILT, class_of
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.chat.tokenizer.merge import merge
from localllm.engine.errors import ModelRefused

from .side_files import BASES, CLASSES, base, flags, side_text, write_folder
from .vocabularies import KINDS

SIZE = {kind: Tokenizer.from_str(base(kind)).get_vocab_size() for kind in BASES}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def entry(content: str, **own: bool) -> dict[str, Any]:
    values = dict.fromkeys(["lstrip", "rstrip", "normalized", "single_word"], False)
    return {"content": content, **values, "special": True, **own}


def typed(content: str, **own: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **entry(content, **own)}


def table(kind: str, *new: dict[str, Any]) -> dict[str, Any]:
    """added_tokens_decoder with the tokens of tokenizer.json and new ones."""
    stored = [entry("<unk>"), entry("<s>"), entry("</s>")]
    return {str(index): value for index, value in enumerate(stored)} | {
        str(SIZE[kind] + index): value for index, value in enumerate(new)
    }


Files = dict[str, dict[str, Any]]


def files(model: str, config: dict[str, Any], **others: dict[str, Any]) -> Files:
    """The side files. `others`: names without .json."""
    named = {"config": {"model_type": model}, "tokenizer_config": config, **others}
    return {f"{name}.json": value for name, value in named.items()}


LLAMA = {"tokenizer_class": "LlamaTokenizer", **{name: typed(text) for name, text in SPECIAL.items()}}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
TOOL = {"<|tool|>": SIZE["byte level"]}
# The files of real repositories, by the kind of tokenizer.json and the name of the case.
CASES: dict[tuple[str, str], Files] = {
    ("llama", "Llama 2"): files("llama", {**LLAMA, "legacy": False, "add_bos_token": True, "pad_token": None}),
    ("llama", "Llama 2, legacy"): files("llama", {**LLAMA, "legacy": True, "add_eos_token": True}),
    ("llama", "Llama 2, no prefix"): files("llama", {**LLAMA, "add_prefix_space": False}),
    ("llama", "fine-tune with a resized vocabulary"): files(
        "llama",
        LLAMA,
        added_tokens={"[PAD]": SIZE["llama"], "<|im_end|>": SIZE["llama"] + 1},
        special_tokens_map={
            "eos_token": "<|im_end|>",
            "pad_token": "[PAD]",
            "bos_token": entry("<s>", normalized=True),
        },
    ),
    ("llama", "Phi-3"): files(
        "phi3", {**LLAMA, "added_tokens_decoder": table("llama", entry("<|end|>", rstrip=True), entry("<|tool|>"))}
    ),
    ("llama", "Mistral v1"): files("mistral", {**LLAMA, "use_default_system_prompt": False, "legacy": True}),
    ("llama, metaspace", "Mistral v3"): files(
        "mistral", {**LLAMA, "added_tokens_decoder": table("llama, metaspace", entry("[INST]"), entry("<|tool|>"))}
    ),
    ("llama, metaspace", "Code Llama"): files(
        "llama",
        {"tokenizer_class": "CodeLlamaTokenizer", "eot_token": "▁<EOT>", "additional_special_tokens": ["▁<PRE>"]},
    ),
    ("gemma", "Gemma"): files(
        "gemma2",
        {
            "tokenizer_class": "GemmaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<|pad|>",
            "additional_special_tokens": ["<|im_end|>", "<tool_call>"],
            "added_tokens_decoder": table("gemma", entry("<|pad|>"), entry("<|im_end|>")),
        },
    ),
    ("gemma", "Gemma 3"): files(
        "gemma3",
        {
            "tokenizer_class": "GemmaTokenizerFast",
            "boi_token": "<image>",
            "extra_special_tokens": {"image_token": "<|tool|>", "eoi_token": "[PAD]"},
        },
    ),
    ("byte level", "Llama 3 by axolotl"): files(
        "llama",
        {**FAST, "eos_token": "<|im_end|>", "pad_token": "<|end|>"},
        special_tokens_map={"eos_token": entry("<|im_end|>"), "additional_special_tokens": ["<|tool|>"]},
    ),
    ("byte level", "DeepSeek"): files(
        "deepseek_v3",
        {"tokenizer_class": "LlamaTokenizerFast", "eos_token": typed("<｜User｜>"), "bos_token": typed("<s>")},
    ),
    ("byte level", "DeepSeek distilled to Qwen"): files(
        "qwen2",
        {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "eos_token": typed("<｜User｜>", normalized=True)},
    ),
    ("byte level", "Qwen 2"): files(
        "qwen2",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_prefix_space": False,
            "split_special_tokens": False,
            "errors": "replace",
            "model_max_length": 10**30,
            "additional_special_tokens": ["<|im_end|>"],
            "added_tokens_decoder": table(
                "byte level", entry("<|endoftext|>"), entry("<|im_end|>"), entry("<tool_call>", special=False)
            ),
        },
    ),
    ("byte level", "Qwen 3 by unsloth"): files(
        "qwen3", {"tokenizer_class": "Qwen2TokenizerFast", "pad_token": "<|pad|>", "padding_side": "left"}
    ),
    ("byte level", "Qwen 3.5"): files("qwen3_5_text", {**FAST, "tokenizer_class": "Qwen2Tokenizer"}),
    ("byte level", "Command R"): files(
        "cohere", {"tokenizer_class": "CohereTokenizerFast", "add_bos_token": True, "sep_token": "</s>"}
    ),
    ("byte level", "Falcon"): files("falcon", {**FAST, "add_prefix_space": False}, special_tokens_map=SPECIAL),
    ("byte level", "SmolLM 2"): files("llama", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}),
    ("byte level", "StarCoder 2"): files("starcoder2", {"tokenizer_class": "GPT2Tokenizer", "vocab_size": 49_152}),
    ("byte level", "Granite"): files("granite", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    ("byte level", "OLMo"): files("olmo", {"tokenizer_class": "GPTNeoXTokenizerFast", "add_eos_token": False}),
    ("byte level", "Phi 2"): files(
        "phi", {"tokenizer_class": "CodeGenTokenizer"}, added_tokens={"\t\t": SIZE["byte level"]}
    ),
    ("byte level", "InternLM"): files(
        "internlm2",
        {"tokenizer_class": "InternLM2Tokenizer", "auto_map": {"AutoTokenizer": ["a.InternLM2Tokenizer", None]}},
    ),
    ("byte level", "before 4.34"): files("llama", FAST, added_tokens=TOOL),
    ("byte level", "flags differ"): files(
        "llama", {**FAST, "added_tokens_decoder": {"2": entry("</s>", lstrip=True, rstrip=True, single_word=True)}}
    ),
    ("byte level", "ids with a gap"): files("llama", {**FAST, "added_tokens_decoder": {"999": entry("<|tool|>")}}),
    ("byte level", "no class, no tokens"): files("llama", {}),
    ("byte level", "class in config.json"): {
        "config.json": {"model_type": "llama", "tokenizer_class": "GPT2TokenizerFast"}
    },
    ("byte level", "special tokens split"): files("llama", {**FAST, "split_special_tokens": True}),
    ("byte level", "pad_token is a word"): files("llama", {**FAST, "pad_token": "the"}),
}


def write(folder: Path, kind: str, side: Files) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(base(kind), "utf-8")
    for name, value in side.items():
        (folder / name).write_text(json.dumps(value), "utf-8")
    return folder


def compare(folder: Path, texts: Iterable[str]) -> int:
    """Compare localllm with transformers; 0 if both refuse the folder, or localllm does, else the number of texts."""
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (TypeError, ValueError, AttributeError):
        return 0
    ours = ChatTokenizer(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    assert theirs.eos_token_id is None or theirs.eos_token_id in ours.eos_ids
    assert ours.vocab_size == len(theirs)
    assert ours.added_ids == theirs.added_tokens_decoder.keys()
    count = 0
    for text in texts:
        for adds in (True, False):
            ids = ours.encode(text, add_special_tokens=adds)
            assert ids == theirs(text, add_special_tokens=adds).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids), text
        marked = ours.encode(ours.protect(text), add_special_tokens=False)
        assert not ours.control_ids.difference([ours.id_of(ours.special_tokens.get("unk_token", ""))]).intersection(
            marked
        )
        count += 1
    return count


def texts(number: int, seed: int) -> Iterable[str]:
    chance = random.Random(seed)
    return (side_text(chance) for _ in range(number))


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[name for _, name in CASES])
def test_files_of_real_repositories(kind: str, name: str, tmp_path: Path) -> None:
    assert compare(write(tmp_path, kind, CASES[kind, name]), texts(40, 1)) == 40


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[name for _, name in CASES])
def test_2000_texts_with_files_of_real_repositories(kind: str, name: str, tmp_path: Path) -> None:
    assert compare(write(tmp_path, kind, CASES[kind, name]), texts(2000, 2)) == 2000


def compare_random(folder: Path, seed: int, number: int) -> bool:
    """Whether localllm accepts the folder. It refuses classes that do not fit the vocabulary."""
    write_folder(folder, random.Random(seed))
    try:
        return compare(folder, texts(number, seed)) == number
    except ModelRefused:
        return False


def test_random_files(tmp_path: Path) -> None:
    assert sum(compare_random(tmp_path / str(seed), seed, 4) for seed in range(120)) > 90


@pytest.mark.slow
def test_many_random_files(tmp_path: Path) -> None:
    assert sum(compare_random(tmp_path / str(seed), seed, 10) for seed in range(1000, 2500)) > 1000


def class_in_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The class that AutoTokenizer chooses; empty if it fails."""
    monkeypatch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(lambda cls, *_, **__: cls.__name__))
    try:
        return str(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except (ValueError, AttributeError, ImportError):
        return ""


def check_class(folder: Path, side: Files, *, byte_level: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in side.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "tokenizer.json").write_text('"ByteLevel"' if byte_level else "{}")
    theirs = class_in_transformers(folder, monkeypatch)
    try:
        ours = class_of(side["tokenizer_config.json"], side["config.json"], lambda: byte_level)
    except ModelRefused:
        assert theirs not in {*BUILT, AS_STORED}, side
        return
    assert ours == theirs or not theirs or (ours, theirs) == (AS_STORED, "PythonBackend"), side


MODELS = sorted({*classes._REGISTERED, *classes._DISTRUSTED, "llama", "deepseek_v3", "unknown"} - {"siglip2"})
NAMES = ["", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "SomeTokenizer"]


def check_models(models: Iterable[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in models:
        for name in NAMES:
            config = {"tokenizer_class": name} if name else {}
            for byte_level in (False, True):
                check_class(folder, files(model, config), byte_level=byte_level, monkeypatch=monkeypatch)


def test_common_models_have_the_class_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_models(["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "cohere2"], tmp_path, monkeypatch)


@pytest.mark.slow
def test_all_models_have_the_class_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_models(MODELS, tmp_path, monkeypatch)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_each_class_of_transformers_is_known(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = {name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))} - {"AutoTokenizer"}
    for name in sorted(exported | set(CLASSES) | {name for name in TOKENIZER_MAPPING_NAMES.values() if name}):
        check_class(tmp_path, files(model, {"tokenizer_class": name}), byte_level=False, monkeypatch=monkeypatch)


REFUSED = {
    "tokenizer_class BertTokenizer": files("llama", {"tokenizer_class": "BertTokenizerFast"}),
    "auto_map": files("llama", {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["a.B", None]}}),
    "tokenizer_class must be": files("llama", {"tokenizer_class": 7}),
    "added_tokens_decoder must be": files("llama", {"added_tokens_decoder": []}),
    "added_tokens_decoder: 'x' must be": files("llama", {"added_tokens_decoder": {"x": entry("<a>")}}),
    "added_tokens_decoder: 5: Expected `str`": files("llama", {"added_tokens_decoder": {"5": {"content": 3}}}),
    "eos_token must be": files("llama", {"eos_token": 2}),
    "extra_special_tokens must be": files("llama", {"extra_special_tokens": "<a>"}),
    "added_tokens.json: the id of '<a>' must be": files("llama", {}, added_tokens={"<a>": "9"}),
    "special_tokens_map.json: eos_token": files("llama", {}, special_tokens_map={"eos_token": {"text": "</s>"}}),
    "extra_special_tokens must be a list of tokens,": files(
        "llama", {}, special_tokens_map={"extra_special_tokens": 5}
    ),
    "extra_special_tokens must be a list of tokens, or": files(
        "llama", {}, special_tokens_map={"additional_special_tokens": entry("<a>")}
    ),
    "half of a surrogate pair": files("llama", {"eos_token": "\ud800"}),
    "'99999999999' must be the id": files("llama", {"added_tokens_decoder": {"9" * 11: entry("<a>")}}),
    "pad_token: Object missing required field `content`": files("llama", {"pad_token": {"__type": "AddedToken"}}),
    "fast_tokenizer_files names": files("llama", {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_files_without_a_meaning_are_refused_by_name(reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=reason):
        ChatTokenizer(write(tmp_path, "byte level", REFUSED[reason]))


def test_a_class_that_cannot_use_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers reads the vocabulary, but the merges are missing: each character becomes a token."""
    write(tmp_path, "llama", files("llama", {"tokenizer_class": "LlamaTokenizer"}))
    KINDS["metaspace"]().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelRefused, match=r"tokenizer_class LlamaTokenizer, .* needs a BPE vocabulary"):
        ChatTokenizer(tmp_path)


def test_a_class_for_another_kind_of_vocabulary_is_refused(tmp_path: Path) -> None:
    """A byte-level class loses the spaces of a sentencepiece vocabulary. The model_type alone may choose it."""
    with pytest.raises(ModelRefused, match=r"Qwen2Tokenizer, .* of the model_type, needs a byte-level vocabulary"):
        ChatTokenizer(write(tmp_path / "first", "llama", files("qwen2", FAST)))
    with pytest.raises(ModelRefused, match=r"GemmaTokenizer, .* needs a sentencepiece vocabulary"):
        ChatTokenizer(write(tmp_path / "second", "byte level", files("gemma2", {})))


def test_odd_values_that_say_nothing_about_tokens_are_ignored(tmp_path: Path) -> None:
    side = files("llama", {**FAST, "model_max_length": 1e30, "fix_mistral_regex": True, "add_prefix_space": "x"})
    side["config.json"] = {"model_type": ["llama"], "model_name": 3, "transformers_version": "main"}
    assert ChatTokenizer(write(tmp_path, "byte level", side)).warnings == ()


def test_tokens_of_side_files_control_the_model(tmp_path: Path) -> None:
    side = files("llama", {**FAST, "eos_token": "<|im_end|>"}, added_tokens={"<tool_call>": SIZE["byte level"]})
    tokenizer = ChatTokenizer(write(tmp_path, "byte level", side))
    assert {"<|im_end|>", "<tool_call>"} <= tokenizer.control_tokens.keys()
    ids = tokenizer.encode(tokenizer.protect("a<|im_end|>b<tool_call>") + "<|im_end|>", add_special_tokens=False)
    assert [token for token in ids if token in tokenizer.control_ids] == [tokenizer.id_of("<|im_end|>")]
    assert tokenizer.vocabulary(tokenizer.vocab_size).control_ids >= tokenizer.eos_ids


def test_a_word_that_is_named_pad_token_stays_text(tmp_path: Path) -> None:
    """transformers hides it in answers; localllm shows it, and a message has the same ids with marks as without."""
    tokenizer = ChatTokenizer(write(tmp_path, "byte level", files("llama", {**FAST, "pad_token": "the"})))
    assert "the" not in tokenizer.control_tokens
    assert tokenizer.id_of("the") not in tokenizer.special_ids
    ids = tokenizer.encode("breathe the", add_special_tokens=False)
    assert tokenizer.encode(tokenizer.protect("</s>breathe the"), add_special_tokens=False)[-len(ids) :] == ids


def test_special_tokens_are_plain_text_if_the_files_split_them(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write(tmp_path, "byte level", files("llama", {**FAST, "split_special_tokens": True})))
    for text in ("a</s>", f"{tokenizer.protect('</s>')}</s>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.control_ids.isdisjoint(ids)


def test_warnings_say_where_files_contradict_each_other(tmp_path: Path) -> None:
    side = files("llama", {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"999": entry("<|tool|>")}})
    first, second = ChatTokenizer(write(tmp_path, "byte level", side)).warnings
    assert "tokenizer_class Qwen2Tokenizer splits words otherwise" in first
    assert "[999]" in second
    assert ChatTokenizer(write(tmp_path, "llama", files("llama", LLAMA))).warnings == ()


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0"])
@pytest.mark.parametrize("splits", ["sequence", "metaspace"])
def test_mistral_regex_is_corrected_where_transformers_does(version: str, splits: str, tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "▁", *(f"word{index}" for index in range(100_001))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    if splits == "sequence":
        split = pre_tokenizers.Split(" ", "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    side = files("mistral", {"tokenizer_class": "LlamaTokenizer", "fix_mistral_regex": True})
    side["config.json"]["transformers_version"] = version
    write(tmp_path, "byte level", side)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = json.loads(AutoTokenizer.from_pretrained(tmp_path)._tokenizer.pre_tokenizer.__getstate__())
    assert json.loads(merge(tmp_path).rust.pre_tokenizer.__getstate__()) == theirs


def test_added_tokens_keep_their_ids_and_flags_in_the_tokenizer_that_encodes_marked_text(tmp_path: Path) -> None:
    """That tokenizer is a copy of the first one. An error of the copy would show only in messages."""
    chance = random.Random(5)
    config = {**FAST, "added_tokens_decoder": table("llama", *(entry(f"<|{n}|>", **flags(chance)) for n in range(9)))}
    rust = merge(write(tmp_path, "llama", files("mistral", config))).rust
    copy = Tokenizer.from_str(rust.to_str())
    assert repr(copy.get_added_tokens_decoder()) == repr(rust.get_added_tokens_decoder())
    assert len(rust.get_added_tokens_decoder()) == 12
