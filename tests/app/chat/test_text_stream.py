"""A TextStream compared with one decode of all tokens, for every kind of decoder in `tokenizers`."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.engine.text import BROKEN, MAX_INCOMPLETE, MAX_WINDOW, StopFilter, TextStream

from .tokenizer.vocabularies import CORPUS, EMOJI, KINDS, SCRIPTS, make_text, vocabulary

SAMPLE = 250  # strings for each kind of vocabulary in every run
FULL_SAMPLE = 20_000  # in runs with --slow
BYTE_KINDS = ["llama", "gemma", "metaspace after bytes", "metaspace before bytes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> ChatTokenizer:
    return vocabulary(request.param, folder)


def byte_ids(tokenizer: ChatTokenizer) -> dict[int, int]:
    """Byte → the token with only this byte, for vocabularies with bytes."""
    single = {}
    for token in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token)
        if len(raw) == 1 and token not in tokenizer.added_ids:
            single.setdefault(raw[0], token)
    return single


def make_tokens(tokenizer: ChatTokenizer, chance: random.Random, singles: dict[int, int]) -> list[int]:
    """Texts, random bytes and random tokens in random order, cut at a random position."""
    tokens: list[int] = []
    for _ in range(chance.randint(1, 3)):
        match chance.randrange(6):
            case 0:
                tokens += chance.choices(range(tokenizer.vocab_size + 2), k=chance.randint(0, 12))
            case 1 if singles:
                raw = chance.randbytes(chance.randint(0, 25))
                tokens += [singles[byte] for byte in raw if byte in singles]
            case 2 if singles:
                raw = "".join(chance.choices(EMOJI, k=chance.randint(1, 4))).encode()
                raw = raw[chance.choice([0, 0, 1]) :]
                tokens += [singles[byte] for byte in raw if byte in singles]
            case 3:
                tokens += chance.choices(sorted(tokenizer.special_ids), k=chance.choice([1, 1, 2, 40]))
            case _:
                tokens += tokenizer.encode(make_text(chance), add_special_tokens=False)
    return tokens[: chance.randint(0, len(tokens))] if chance.random() < 0.5 else tokens


def samples(tokenizer: ChatTokenizer, number: int) -> Iterator[tuple[list[int], random.Random]]:
    singles = byte_ids(tokenizer)
    for seed in range(number):
        chance = random.Random(seed)
        yield make_tokens(tokenizer, chance, singles), chance


def stream_text(tokenizer: ChatTokenizer, tokens: list[int], chance: random.Random) -> tuple[str, int]:
    """The text of the stream and the number of tokens that it reported."""
    hidden = tokenizer.special_ids
    stream = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden))
    pieces = []
    counted = 0
    start = 0
    while start < len(tokens):
        size = chance.choice([1, 1, 1, 2, 5, 50])
        pieces.append(stream.push(tokens[start : start + size]))
        counted += stream.settle()
        start += size
    pieces.append(stream.finish())
    return "".join(pieces), counted + stream.settle()


def compare(tokenizer: ChatTokenizer, number: int) -> None:
    for tokens, chance in samples(tokenizer, number):
        text = tokenizer.decode(tokens, hidden=tokenizer.special_ids)
        assert stream_text(tokenizer, tokens, chance) == (text, len(tokens)), tokens


def test_the_text_equals_one_decode_of_all_tokens(tokenizer: ChatTokenizer) -> None:
    compare(tokenizer, SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_text_equals_one_decode_of_all_tokens_for_many_strings(tokenizer: ChatTokenizer) -> None:
    compare(tokenizer, FULL_SAMPLE)


def test_each_token_completes_all_text_except_an_incomplete_character(tokenizer: ChatTokenizer) -> None:
    """An incomplete character is at most three U+FFFD at the end. Tokens count when their text is complete."""
    hidden = tokenizer.special_ids
    for tokens, _ in samples(tokenizer, SAMPLE // 5):
        stream = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden))
        shown = ""
        counted = 0
        clean = 0  # number of tokens up to the last one after which no text waited
        lengths: list[int] = []
        for count, token in enumerate(tokens, start=1):
            shown += stream.push([token])
            counted += stream.settle()
            text = tokenizer.decode(tokens[:count], hidden=hidden)
            waiting = min(len(text) - len(text.rstrip(BROKEN)), MAX_INCOMPLETE)
            assert shown == text[: len(text) - waiting], tokens[:count]
            lengths.append(len(text))
            clean = clean if waiting else count
            assert counted == max(clean, sum(length <= len(shown) for length in lengths[clean:]) + clean), tokens
            result = stream_text(tokenizer, tokens[:count], random.Random(count))
            assert result == (text, count), "`finish` completes the text after any number of tokens"


def test_a_text_that_continues_a_prompt_equals_the_end_of_both_decoded(tokenizer: ChatTokenizer) -> None:
    hidden = tokenizer.special_ids
    before = tokenizer.encode(CORPUS[0] + " and", add_special_tokens=True)
    prompt_text = tokenizer.decode(before, hidden=hidden)
    for tokens, _ in samples(tokenizer, SAMPLE):
        stream = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden), before=before)
        text = stream.push(tokens) + stream.finish()
        assert prompt_text + text == tokenizer.decode(before + tokens, hidden=hidden), tokens


def test_token_bytes_join_to_the_text(folder: Path) -> None:
    """This does not hold for vocabularies with suffixes: the next token decides if a space follows a word."""
    for kind in sorted(KINDS.keys() - {"suffixes"}):
        tokenizer = vocabulary(kind, folder)
        before = tokenizer.encode("the fox", add_special_tokens=False)
        prompt_text = tokenizer.decode(before)
        for seed in range(SAMPLE):
            tokens = tokenizer.encode(make_text(random.Random(seed)), add_special_tokens=False)
            raw = b"".join(tokenizer.token_bytes(token) for token in tokens)
            assert prompt_text + raw.decode("utf-8", "replace") == tokenizer.decode(before + tokens), (kind, tokens)


def test_letters_as_added_tokens_stay_unchanged(folder: Path) -> None:
    tokenizer = vocabulary("byte level", folder)
    text = "für naïve õ÷ 日本語"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert stream_text(tokenizer, tokens, random.Random(0)) == (text, len(tokens))


def test_a_character_that_starts_in_the_prompt_is_complete(folder: Path) -> None:
    tokenizer = vocabulary("llama", folder)
    tokens = tokenizer.encode("🇫🇷", add_special_tokens=False)
    stream = TextStream(tokenizer.decode, before=tokens[:-2])
    assert stream.push(tokens[-2:]) == "🇷"


@pytest.mark.parametrize("kind", ["byte level", *BYTE_KINDS])
def test_a_stop_string_may_span_characters_of_several_tokens(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    for seed in range(SAMPLE):
        chance = random.Random(seed)
        text = "".join(chance.choices([*EMOJI, "ok", " ", "日本", "語"], k=8))
        start = chance.randrange(len(text))
        stop = text[start : start + chance.randint(1, 4)]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        expected = tokenizer.decode(tokens)
        stream = TextStream(tokenizer.decode)
        stops = StopFilter([stop])
        shown = "".join([stops.feed(stream.push([token])) for token in tokens])
        shown += stops.feed(stream.finish()) + stops.finish()
        assert shown == expected.partition(stop)[0], (text, stop)
        assert stops.stopped == (stop in expected)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_adjacent_characters_of_several_byte_tokens_are_complete(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    for text in ("🇫🇷 ok", "👨‍👩‍👧‍👦 ok", "ไทย한국ok", "𝔘𝔫\nok"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert stream_text(tokenizer, tokens, random.Random(0)) == (text, len(tokens))


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_a_broken_byte_keeps_the_characters_around_it(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    single = byte_ids(tokenizer)
    raw = b"\n\xff" + "🇫🇷".encode() + b"\xe6\x97" + "語".encode() + b"\xf0\x9f\x87"
    tokens = [single[byte] for byte in raw]
    assert tokenizer.decode(tokens) == f"\n{BROKEN}🇫🇷{BROKEN * 2}語{BROKEN * 3}"
    for end in range(len(tokens)):
        assert stream_text(tokenizer, tokens[:end], random.Random(0))[0] == tokenizer.decode(tokens[:end])


def test_bytes_are_decoded_as_in_sentencepiece(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CORPUS[0]] * 50 + CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        character_coverage=0.98,  # other characters are bytes
        minloglevel=9,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = _from_sentencepiece(processor, folder / "sentencepiece")
    single = byte_ids(tokenizer)
    texts = [make_text(random.Random(seed)) for seed in range(SAMPLE)]
    for seed, text in enumerate([*SCRIPTS, *EMOJI, *texts]):
        chance = random.Random(seed)
        tokens = processor.encode(text) + [single[byte] for byte in chance.randbytes(8) if byte != ord(" ")]
        tokens = tokens[chance.choice([0, 0, 1]) :]
        chance.shuffle(tokens) if chance.random() < 0.3 else None
        tokens = tokens[: chance.randint(0, len(tokens))]
        tokens = [token for token in tokens if token not in tokenizer.special_ids]
        assert tokenizer.decode(tokens) == processor.decode(tokens), tokens


def _from_sentencepiece(processor: object, folder: Path) -> ChatTokenizer:
    """The same vocabulary with the decoder of Llama."""
    from tokenizers import decoders, models

    names = [processor.id_to_piece(token) for token in range(processor.get_piece_size())]  # type: ignore[attr-defined]
    rust = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, [], byte_fallback=True))
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    spaces = decoders.Replace("▁", " ")
    rust.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_the_decoder_of_tokenizers_also_streams_complete_characters(kind: str, folder: Path) -> None:
    """The library temporarily drops the characters before an incomplete one."""
    tokenizer = vocabulary(kind, folder)
    rust = Tokenizer.from_file(str(folder / kind / "tokenizer.json"))
    for seed in range(SAMPLE):
        tokens = tokenizer.encode(make_text(random.Random(seed)), add_special_tokens=False)
        stream = TextStream(rust.decode)
        text = "".join([stream.push([token]) for token in tokens]) + stream.finish()
        assert text == rust.decode(tokens) == tokenizer.decode(tokens, hidden=tokenizer.special_ids)


@pytest.mark.parametrize("kind", ["byte level", *BYTE_KINDS])
def test_the_window_stays_short_with_broken_bytes(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    single = byte_ids(tokenizer)
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return tokenizer.decode(ids, hidden=tokenizer.special_ids)

    end = min(tokenizer.special_ids)
    for raw in (b"\x80", b"\xf0", b"\xf0\x9f\x98", b"\x98\xf0\x9f", "語".encode(), b"\xf0\x9f\x87"):
        tokens = [single[byte] for byte in raw * 60] + [end] * 40 + [single[byte] for byte in raw]
        sizes.clear()
        stream = TextStream(decode)
        text = "".join([stream.push([token]) for token in tokens]) + stream.finish()
        assert max(sizes) <= 2 * MAX_WINDOW + 2
        assert sum(sizes) <= 25 * len(tokens)
        assert text == tokenizer.decode(tokens, hidden=tokenizer.special_ids)


@pytest.mark.parametrize("kind", ["llama", "metaspace", "metaspace after bytes"])
def test_tokens_without_text_before_a_space_do_not_hide_it(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    end = min(tokenizer.special_ids)
    space = tokenizer.id_of("▁")
    assert space is not None
    tokens = [*[end] * 40, space, *[end] * 40, *tokenizer.encode("fox", add_special_tokens=False)]
    assert stream_text(tokenizer, tokens, random.Random(0)) == (" fox", len(tokens))


def test_broken_bytes_are_emitted_though_tokenizers_drops_characters(folder: Path) -> None:
    tokenizer = vocabulary("llama", folder)
    rust = Tokenizer.from_file(str(folder / "llama" / "tokenizer.json"))
    single = byte_ids(tokenizer)
    stream = TextStream(rust.decode)
    shown = "".join([stream.push([single[byte]]) for byte in "é".encode() + b"\xff" * 100])
    assert len(shown.removeprefix("é").strip(BROKEN)) == 0
    assert len(shown) > 90
