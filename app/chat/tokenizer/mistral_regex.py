"""The correction of the splitting of words that Mistral's older files need (`fix_mistral_regex`)."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, pre_tokenizers

from .files import SideFiles

_MODELS = (None, "mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MIN_VOCAB = 100_000  # smaller vocabularies are of sentencepiece, without this splitting
_FIRST_CORRECT = 5  # the major version of transformers that writes correct files
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def correct(tokenizer: Tokenizer, files: SideFiles) -> None:
    """Replace the splitting of words if tokenizer_config.json asks for it and the files are old ones of Mistral."""
    current = tokenizer.pre_tokenizer
    if files.config.get("fix_mistral_regex") is not True or current is None:
        return
    major = str(files.model.get("transformers_version")).partition(".")[0]
    is_old = not major.isdecimal() or int(major[:9]) < _FIRST_CORRECT
    if tokenizer.get_vocab_size() <= _MIN_VOCAB or not is_old or files.model.get("model_type") not in _MODELS:
        return
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    if isinstance(current, pre_tokenizers.Sequence):
        current[0] = words
        return
    if isinstance(current, pre_tokenizers.Metaspace):
        current = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, current])
