"""The tokenizers that classes in transformers build: vocabulary and merges of tokenizer.json, other parts their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ....engine.errors import ModelRefused

_END_OF_TEXT = "<|endoftext|>"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

USE_STORED = (
    "if tokenizer.json is right, set tokenizer_class to TokenizersBackend in tokenizer_config.json; the model types "
    "qwen2 and qwen3_5 have no such choice"
)

Config = Mapping[str, Any]  # tokenizer_config.json
Build = Callable[[Tokenizer, Config], None]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A class. `build` changes a tokenizer that has a BPE model and nothing else."""

    build: Build
    named: Mapping[str, str | None]  # special tokens by name, where tokenizer_config.json has no value
    # Tokens around a raw prompt: as in tokenizer.json, none, or bos_token before it.
    around: Literal["stored", "none", "bos"] = "stored"
    # A second addition of all special tokens: none, without their flags, or with the flags in the files.
    second_addition: Literal["", "plain", "special"] = ""
    # Whether this is a sentencepiece class: characters that are no token become tokens of bytes, a space is ▁, not Ġ.
    has_bytes: bool = False
    has_unknown: bool = False  # whether the unknown token stands for other characters, else they are left out


def build(name: str, stored: Tokenizer, config: Config, unknown: str | None) -> Tokenizer:
    """The tokenizer of a class, without added tokens and without tokens around a prompt. It shares the model of
    `stored`, which must not be used afterwards. Raises ModelRefused."""
    pipeline = PIPELINES[name]
    model = stored.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise _misfit(name, "a BPE vocabulary without prefixes and suffixes")
    if model.token_to_id("▁" if pipeline.has_bytes else "Ġ") is None:
        raise _misfit(name, "a sentencepiece vocabulary" if pipeline.has_bytes else "a byte-level vocabulary")
    if pipeline.has_unknown and model.token_to_id(str(unknown)) is None and not _has_all_bytes(model):
        raise ModelRefused(f"tokenizer_class {name}: the vocabulary of tokenizer.json lacks the unk_token {unknown}")
    model.dropout = None
    model.unk_token = str(unknown) if pipeline.has_unknown else None
    model.fuse_unk = model.byte_fallback = pipeline.has_bytes
    model.ignore_merges = False
    tokenizer = Tokenizer(model)
    pipeline.build(tokenizer, config)
    return tokenizer


def _misfit(name: str, needed: str) -> ModelRefused:
    return ModelRefused(
        f"tokenizer_class {name}, of tokenizer_config.json or of the model_type, needs {needed} in tokenizer.json",
        hint=f"transformers builds a useless tokenizer from these files; {USE_STORED}",
    )


def _has_all_bytes(model: models.BPE) -> bool:
    return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))


def _llama(tokenizer: Tokenizer, config: Config) -> None:
    prefix = config.get("add_prefix_space")
    has_prefix = prefix is None or bool(prefix)
    scheme = ("always" if config.get("legacy", False) else "first") if has_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = _sentencepiece_decoder(strips=has_prefix)


def _code_llama(tokenizer: Tokenizer, config: Config) -> None:
    prefix = config.get("add_prefix_space", True)
    scheme = "first" if prefix is None or prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = _sentencepiece_decoder(strips=True)


def _gemma(tokenizer: Tokenizer, config: Config) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _sentencepiece_decoder(strips=False)


def _sentencepiece_decoder(*, strips: bool) -> decoders.Decoder:
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strips else chain)


def _byte_level(*before: pre_tokenizers.PreTokenizer, regex: str = "", composes: bool = True) -> Build:
    """`before`: steps before the bytes. `regex`: splits words instead of the rule of GPT-2. `composes`: NFC."""

    def build_byte_level(tokenizer: Tokenizer, config: Config) -> None:
        prefix = bool(config.get("add_prefix_space", False))
        steps = list(before)
        if regex:
            steps.append(pre_tokenizers.Split(Regex(regex), "isolated"))
        if composes:
            tokenizer.normalizer = normalizers.NFC()
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not regex))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
        tokenizer.decoder = decoders.ByteLevel()

    return build_byte_level


_GPT2_NAMED = {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), "pad_token": None}
_QWEN_NAMED = {"bos_token": None, **dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT)}
_LLAMA_NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_INFILLING = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}

PIPELINES: Mapping[str, Pipeline] = MappingProxyType(
    {
        "LlamaTokenizer": Pipeline(_llama, _LLAMA_NAMED, has_bytes=True),
        "CodeLlamaTokenizer": Pipeline(
            _code_llama,
            _LLAMA_NAMED | _INFILLING,
            around="bos",
            has_bytes=True,
            has_unknown=True,
        ),
        "GPT2Tokenizer": Pipeline(_byte_level(composes=False), _GPT2_NAMED),
        "CodeGenTokenizer": Pipeline(_byte_level(composes=False), _GPT2_NAMED),
        "GPTNeoXTokenizer": Pipeline(_byte_level(), {**_GPT2_NAMED, "pad_token": "<|padding|>"}, around="none"),
        "Qwen2Tokenizer": Pipeline(_byte_level(regex=_QWEN2), _QWEN_NAMED, second_addition="plain"),
        "Qwen3_5Tokenizer": Pipeline(_byte_level(regex=_QWEN3_5), _QWEN_NAMED),
        "GemmaTokenizer": Pipeline(
            _gemma,
            {
                "unk_token": "<unk>",
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "mask_token": "<mask>",
            },
            has_bytes=True,
            has_unknown=True,
        ),
        "CohereTokenizer": Pipeline(
            _byte_level(pre_tokenizers.Digits(individual_digits=True)),
            {
                "unk_token": "<UNK>",
                "bos_token": "<BOS_TOKEN>",
                "eos_token": "<|END_OF_TURN_TOKEN|>",
                "pad_token": "<PAD>",
                "cls_token": "<CLS>",
                "sep_token": "<SEP>",
                "mask_token": "<MASK_TOKEN>",
            },
            second_addition="special",
        ),
    }
)
