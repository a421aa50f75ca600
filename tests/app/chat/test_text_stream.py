"""Text in pieces against one decode of all tokens, with every kind of decoder that `tokenizers` has."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from localllm.app.chat.tokenizer import ChatTokenizer
from localllm.engine.text import BROKEN, MAX_INCOMPLETE, MAX_WINDOW, TextStream

from .vocabularies import CORPUS, EMOJI, KINDS, SCRIPTS, make_text, vocabulary

SOME, ALL = 250, 20_000  # strings for each kind of vocabulary: in every run, and in those with --slow
BYTE_KINDS = ["llama", "gemma", "metaspace after bytes", "metaspace before bytes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> ChatTokenizer:
    return vocabulary(request.param, folder)


def byte_ids(tokenizer: ChatTokenizer) -> dict[int, int]:
    """Byte -> the token that is this byte alone, of vocabularies that have bytes."""
    single = {}
    for token in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token)
        if len(raw) == 1 and token not in tokenizer.added_ids:
            single.setdefault(raw[0], token)
    return single


def make_tokens(tokenizer: ChatTokenizer, chance: random.Random, singles: dict[int, int]) -> list[int]:
    """Texts, random bytes (whole characters, or not) and random tokens, in any order and cut anywhere."""
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


def in_pieces(tokenizer: ChatTokenizer, tokens: list[int], chance: random.Random) -> tuple[str, int]:
    """The stream's text and the tokens that it reported."""
    hidden = tokenizer.special_ids
    stream = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden))
    pieces, at = [], 0
    while at < len(tokens):
        size = chance.choice([1, 1, 1, 2, 5, 50])
        pieces.append(stream.push(tokens[at : at + size]))
        at += size
    pieces.append(stream.finish())
    return "".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces)


def compare(tokenizer: ChatTokenizer, number: int) -> None:
    for tokens, chance in samples(tokenizer, number):
        whole = tokenizer.decode(tokens, hidden=tokenizer.special_ids)
        assert in_pieces(tokenizer, tokens, chance) == (whole, len(tokens)), tokens


def test_pieces_equal_one_decode_of_all_tokens(tokenizer: ChatTokenizer) -> None:
    compare(tokenizer, SOME)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pieces_equal_one_decode_of_all_tokens_of_many_strings(tokenizer: ChatTokenizer) -> None:
    compare(tokenizer, ALL)


def test_after_each_token_all_text_that_is_certain_is_there_and_its_tokens_are_counted(
    tokenizer: ChatTokenizer,
) -> None:
    """All but the U+FFFD at the end, at most three."""
    hidden = tokenizer.special_ids
    for tokens, _ in samples(tokenizer, SOME // 5):
        stream = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden))
        shown, counted, clean = "", 0, 0
        lengths: list[int] = []
        for count, token in enumerate(tokens, start=1):
            piece = stream.push([token])
            shown, counted = shown + piece.text, counted + piece.tokens
            whole = tokenizer.decode(tokens[:count], hidden=hidden)
            waiting = min(len(whole) - len(whole.rstrip(BROKEN)), MAX_INCOMPLETE)
            assert shown == whole[: len(whole) - waiting], tokens[:count]
            lengths.append(len(whole))
            clean = clean if waiting else count
            assert counted == max(clean, sum(length <= len(shown) for length in lengths[clean:]) + clean), tokens
            ended = in_pieces(tokenizer, tokens[:count], random.Random(count))
            assert ended == (whole, count), "`finish` after any prefix gives its whole decode"


def test_what_goes_on_from_a_prompt_is_what_it_adds_to_the_prompt(tokenizer: ChatTokenizer) -> None:
    hidden = tokenizer.special_ids
    before = tokenizer.encode(CORPUS[0] + " and", add_special_tokens=True)
    prompt_text = tokenizer.decode(before, hidden=hidden)
    for tokens, _ in samples(tokenizer, SOME):
        stream = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden), before=before)
        text = stream.push(tokens).text + stream.finish().text
        assert prompt_text + text == tokenizer.decode(before + tokens, hidden=hidden), tokens


def test_the_bytes_of_tokens_join_to_the_text(folder: Path) -> None:
    """Log-probabilities report them. Where a suffix ends a word, the next token decides whether a space follows."""
    for kind in sorted(KINDS.keys() - {"suffixes"}):
        tokenizer = vocabulary(kind, folder)
        before = tokenizer.encode("the fox", add_special_tokens=False)
        prompt_text = tokenizer.decode(before)
        for seed in range(SOME):
            tokens = tokenizer.encode(make_text(random.Random(seed)), add_special_tokens=False)
            raw = b"".join(tokenizer.token_bytes(token) for token in tokens)
            assert prompt_text + raw.decode("utf-8", "replace") == tokenizer.decode(before + tokens), (kind, tokens)


def test_letters_that_are_added_as_tokens_come_out_as_they_went_in(folder: Path) -> None:
    tokenizer = vocabulary("byte level", folder)
    text = "für naïve õ÷ 日本語"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert in_pieces(tokenizer, tokens, random.Random(0)) == (text, len(tokens))


def test_a_character_that_begins_in_the_prompt_is_whole(folder: Path) -> None:
    tokenizer = vocabulary("llama", folder)
    tokens = tokenizer.encode("🇫🇷", add_special_tokens=False)
    stream = TextStream(tokenizer.decode, before=tokens[:-2])
    assert stream.push(tokens[-2:]).text == "🇷"


@pytest.mark.parametrize("kind", ["byte level", *BYTE_KINDS])
def test_stop_strings_are_found_across_characters_of_several_tokens(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    for seed in range(SOME):
        chance = random.Random(seed)
        text = "".join(chance.choices([*EMOJI, "ok", " ", "日本", "語"], k=8))
        at = chance.randrange(len(text))
        stop = text[at : at + chance.randint(1, 4)]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(tokens)
        stream = TextStream(tokenizer.decode, [stop])
        shown = "".join([stream.push([token]).text for token in tokens])
        shown += stream.finish().text
        assert shown == whole.partition(stop)[0], (text, stop)
        assert stream.stopped == (stop in whole)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_flags_and_the_text_after_them(kind: str, folder: Path) -> None:
    """Adjacent characters of several byte tokens each, and ASCII behind them."""
    tokenizer = vocabulary(kind, folder)
    for text in ("🇫🇷 ok", "👨‍👩‍👧‍👦 ok", "ไทย한국ok", "𝔘𝔫\nok"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert in_pieces(tokenizer, tokens, random.Random(0)) == (text, len(tokens))


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_one_broken_byte_destroys_no_character(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    single = byte_ids(tokenizer)
    raw = b"\n\xff" + "🇫🇷".encode() + b"\xe6\x97" + "語".encode() + b"\xf0\x9f\x87"
    tokens = [single[byte] for byte in raw]
    assert tokenizer.decode(tokens) == f"\n{BROKEN}🇫🇷{BROKEN * 2}語{BROKEN * 3}"
    for end in range(len(tokens)):
        assert in_pieces(tokenizer, tokens[:end], random.Random(0))[0] == tokenizer.decode(tokens[:end])


def test_bytes_are_decoded_as_sentencepiece_does(folder: Path) -> None:
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
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = _from_pieces(pieces, folder / "sentencepiece")
    single = byte_ids(tokenizer)
    texts = [make_text(random.Random(seed)) for seed in range(SOME)]
    for seed, text in enumerate([*SCRIPTS, *EMOJI, *texts]):
        chance = random.Random(seed)
        tokens = pieces.encode(text) + [single[byte] for byte in chance.randbytes(8) if byte != ord(" ")]
        tokens = tokens[chance.choice([0, 0, 1]) :]
        chance.shuffle(tokens) if chance.random() < 0.3 else None
        tokens = tokens[: chance.randint(0, len(tokens))]
        tokens = [token for token in tokens if token not in tokenizer.special_ids]
        assert tokenizer.decode(tokens) == pieces.decode(tokens), tokens


def _from_pieces(pieces: object, place: Path) -> ChatTokenizer:
    """The same vocabulary with Llama's decoder."""
    from tokenizers import decoders, models

    names = [pieces.id_to_piece(token) for token in range(pieces.get_piece_size())]  # type: ignore[attr-defined]
    made = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, [], byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    spaces = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    place.mkdir()
    made.save(str(place / "tokenizer.json"))
    return ChatTokenizer(place)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_the_decoder_of_tokenizers_itself_gives_whole_characters(kind: str, folder: Path) -> None:
    """It takes back the characters before an incomplete one; texts of whole characters come out as they are."""
    tokenizer = vocabulary(kind, folder)
    theirs = Tokenizer.from_file(str(folder / kind / "tokenizer.json"))
    for seed in range(SOME):
        tokens = tokenizer.encode(make_text(random.Random(seed)), add_special_tokens=False)
        stream = TextStream(theirs.decode)
        text = "".join([stream.push([token]).text for token in tokens]) + stream.finish().text
        assert text == theirs.decode(tokens) == tokenizer.decode(tokens, hidden=tokenizer.special_ids)


@pytest.mark.parametrize("kind", ["byte level", *BYTE_KINDS])
def test_the_window_stays_short_whatever_is_broken(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    single = byte_ids(tokenizer)
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return tokenizer.decode(ids, hidden=tokenizer.special_ids)

    end = sorted(tokenizer.special_ids)[0]
    for raw in (b"\x80", b"\xf0", b"\xf0\x9f\x98", b"\x98\xf0\x9f", "語".encode(), b"\xf0\x9f\x87"):
        tokens = [single[byte] for byte in raw * 60] + [end] * 40 + [single[byte] for byte in raw]
        sizes.clear()
        stream = TextStream(decode)
        text = "".join([stream.push([token]).text for token in tokens]) + stream.finish().text
        assert max(sizes) <= 2 * MAX_WINDOW + 2
        assert sum(sizes) <= 25 * len(tokens)
        assert text == tokenizer.decode(tokens, hidden=tokenizer.special_ids)


@pytest.mark.parametrize("kind", ["llama", "metaspace", "metaspace after bytes"])
def test_a_first_space_among_many_tokens_without_text_counts_as_the_first(kind: str, folder: Path) -> None:
    tokenizer = vocabulary(kind, folder)
    (end, *_), space = sorted(tokenizer.special_ids), tokenizer.id_of("▁")
    assert space is not None
    tokens = [*[end] * 40, space, *[end] * 40, *tokenizer.encode("fox", add_special_tokens=False)]
    assert in_pieces(tokenizer, tokens, random.Random(0)) == (" fox", len(tokens))


def test_broken_bytes_come_out_although_tokenizers_takes_characters_back(folder: Path) -> None:
    tokenizer = vocabulary("llama", folder)
    theirs = Tokenizer.from_file(str(folder / "llama" / "tokenizer.json"))
    single = byte_ids(tokenizer)
    stream = TextStream(theirs.decode)
    shown = "".join([stream.push([single[byte]]).text for byte in "é".encode() + b"\xff" * 100])
    assert len(shown.removeprefix("é").strip(BROKEN)) == 0
    assert len(shown) > 90
