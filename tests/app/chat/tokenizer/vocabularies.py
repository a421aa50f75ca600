"""Small tokenizers, one for each kind of decoder in `tokenizers`, trained on a few lines; and texts for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.chat.tokenizer.special_tokens import PROTECT, RELEASE

SPECIAL = ["<unk>", "<s>", "</s>"]
NO_BYTES = "ÀÁõö÷øùúûüýþÿ"  # ByteLevel letters of bytes that UTF-8 never has; DeepSeek adds them as tokens
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

CORPUS = [
    "the quick brown fox jumps over the lazy dog, isn't it? It's fine. We do not know!",
    "größer naïve café Ångström; один два три; ένα δύο; שלום; مرحبا بالعالم",
    "日本語のテキスト 你好世界 한국어 텍스트 สวัสดี नमस्ते",
    'def f(x):\n\treturn {"a": [1, 2, 3]}  # two  spaces',
]

SCRIPTS = [
    "the quick brown fox, isn't",
    "àéîõüßçñøåŁœ",
    "Привет мир ёжик",
    "Ελληνικά άλφα",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया क्षि",
    "สวัสดีชาวโลก",
    "ไทยកម្ពុជាမြန်မာ",
    "日本語漢字仮名まじりカタカナ",
    "你好世界简体繁體",
    "한국어텍스트",
    "ᏣᎳᎩ ⴰⵎⴰⵣⵉⵖ ᓀᐦᐃᔭᐍᐏᐣ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈𐌰 𒀀𒁀 𓀀",
    "e\u0301a\u0308\u0323o\u0302\u0301",
    "\ufffd\u2581\u00a0\u200b\u200d\u202e\ufeff",
    " \t\n\r\x00\x7f  ",
    "<0x41><s></s><unk>▁##",
]
EMOJI = ["🇫🇷", "🇯🇵🇩🇪", "👨‍👩‍👧‍👦", "👍🏽", "❤️‍🔥", "1️⃣", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "😀😃", "🧑🏿‍🚀", "☺", "\U0010ffff"]


def make_text(chance: random.Random) -> str:
    """A random mixture of many scripts, emoji sequences and spaces."""
    segments = []
    for _ in range(chance.randint(0, 6)):
        script = chance.choice(SCRIPTS)
        start = chance.randrange(len(script))
        segments.append(chance.choice([script[start : start + chance.randint(1, 9)], chance.choice(EMOJI), " ", "ok"]))
    return "".join(segments)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        initial_alphabet=sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(NO_BYTES)),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([*NO_BYTES, "naïve", AddedToken("日本", normalized=False)])
    return tokenizer


def _word_ends() -> Tokenizer:
    """A tokenizer like that of CLIP: the last token of a word ends in </w>, in a byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(f"{letter}</w>" for letter in alphabet)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.add_special_tokens(SPECIAL)
    blanks = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([blanks, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("</w>", " "), decoders.ByteLevel()])
    return tokenizer


def _byte_fallback(chain: list[decoders.Decoder], *, prefix: bool) -> Tokenizer:
    """A tokenizer as transformers converts it from the sentencepiece files of Llama, Mistral and Gemma."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    changes: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=500, min_frequency=1, special_tokens=[*SPECIAL, *BYTES], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_plain_bytes(tokenizer, chain)


def _unigram(chain: list[decoders.Decoder], *, byte_fallback: bool) -> Tokenizer:
    """A tokenizer like those of T5 and XLM, with or without bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = [*SPECIAL, *(BYTES if byte_fallback else [])]
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=specials, unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if byte_fallback:
        tokenizer.model = models.Unigram(_scores(tokenizer), unk_id=0, byte_fallback=True)
    return _with_plain_bytes(tokenizer, chain)


def _scores(tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """The vocabulary without tokens that have characters above U+00FF."""
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    return [(text, score) for text, score in vocabulary if all(ord(char) < 256 or char == "▁" for char in text)]


def _with_plain_bytes(tokenizer: Tokenizer, chain: list[decoders.Decoder]) -> Tokenizer:
    """Remove the byte tokens from the added tokens: trainers need them there, but real files do not have them there."""
    value = json.loads(tokenizer.to_str())
    value["added_tokens"] = [entry for entry in value["added_tokens"] if entry["content"] not in BYTES]
    tokenizer = Tokenizer.from_str(json.dumps(value))
    tokenizer.decoder = decoders.Sequence(chain) if len(chain) > 1 else chain[0]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.train_from_iterator(
        [*CORPUS, *SCRIPTS], trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def _suffixes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, *SCRIPTS], trainer)
    return tokenizer


def _words() -> Tokenizer:
    """A tokenizer without a decoder: it joins words with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *SCRIPTS], trainer)
    return tokenizer


def _spaces() -> decoders.Decoder:
    return decoders.Replace("▁", " ")


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "byte level, word ends": _word_ends,
    "llama": lambda: _byte_fallback(
        [_spaces(), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)], prefix=True
    ),
    "gemma": lambda: _byte_fallback([_spaces(), decoders.ByteFallback(), decoders.Fuse()], prefix=False),
    "metaspace after bytes": lambda: _unigram([decoders.ByteFallback(), decoders.Metaspace()], byte_fallback=True),
    "metaspace before bytes": lambda: _unigram(
        [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()], byte_fallback=True
    ),
    "metaspace": lambda: _unigram([decoders.Metaspace()], byte_fallback=False),
    "wordpiece": _word_piece,
    "suffixes": _suffixes,
    "words": _words,
}


# Markers of chat templates, and flags of their tokens in tokenizer.json.
TURNS = ["<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<｜User｜>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "[INST]",
    "<|w|>",
]
FLAGS = [
    {},
    {"lstrip": True},
    {"rstrip": True},
    {"single_word": True},
    {"normalized": True},
    {"normalized": True, "lstrip": True, "rstrip": True},
]
NORMALIZERS = {
    "": [],
    "NFC": [normalizers.NFC()],
    "NFKC": [normalizers.NFKC()],
    "lower case": [normalizers.NFKC(), normalizers.Lowercase()],
}


def with_markers(kind: str, normalizer: str, *, special: bool, seed: int) -> Tokenizer:
    """The tokenizer of this kind with TURNS, MARKERS with random flags, and words and spaces as added tokens."""
    chance = random.Random(seed)
    tokenizer = KINDS[kind]()
    own = [tokenizer.normalizer] if tokenizer.normalizer else []
    if NORMALIZERS[normalizer] or own:
        tokenizer.normalizer = normalizers.Sequence([*NORMALIZERS[normalizer], *own])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in TURNS])
    flags = [{"normalized": False} | chance.choice(FLAGS) for _ in MARKERS]
    tokenizer.add_tokens([AddedToken(text, special=special, **flag) for text, flag in zip(MARKERS, flags, strict=True)])
    tokenizer.add_tokens([AddedToken("    ", normalized=False), "naïve", "<b>"])
    return tokenizer


def wide(text: str) -> str:
    """The text with full-width letters and signs. NFKC makes them the usual ones."""
    return "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text)


def hostile_text(chance: random.Random, markers: Sequence[str]) -> str:
    """A text of markers: whole, inside each other, in parts, with marks of protection, and in other spellings."""
    segments = []
    for _ in range(chance.randint(1, 6)):
        marker = chance.choice(markers)
        cut = chance.randrange(len(marker) + 1)
        start, end = marker[:cut], marker[cut:]
        spellings = [marker, start + marker + end, start, end, wide(marker), marker.upper()]
        spellings += [start + PROTECT + end, start + RELEASE + end]
        segments += [chance.choice(spellings), chance.choice(["", " ", "  ", "\n", make_text(chance)])]
    return "".join(segments)


def save(tokenizer: Tokenizer, folder: Path) -> ChatTokenizer:
    """The tokenizer after its files are written to a folder, with the tokens of SPECIAL."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTokenizer(folder)


@cache
def vocabulary(kind: str, folder: Path) -> ChatTokenizer:
    """The tokenizer of this kind. The first call trains it and writes its files to a folder in `folder`."""
    model = folder / kind
    return ChatTokenizer(model) if model.exists() else save(KINDS[kind](), model)
