from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken

from localllm.app.chat.tokenizer.protection import Finder, Protection
from localllm.app.chat.tokenizer.special_tokens import PROTECT, RELEASE

from .... import work
from .vocabularies import KINDS, MARKERS, NORMALIZERS, TURNS, hostile_text, make_text, save, with_markers

SAMPLE = 60  # texts for each tokenizer
# Kinds whose tokens spell any text. The others lose white space or unknown characters.
WITH_BYTES = ["byte level", "llama", "gemma", "metaspace after bytes", "metaspace before bytes"]
REMOVE_MARKS = str.maketrans("", "", PROTECT + RELEASE)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("special", "seed"), [(False, 0), (False, 1), (True, 2)])
def test_protected_text_has_no_control_token(
    kind: str, normalizer: str, special: bool, seed: int, tmp_path: Path
) -> None:
    tokenizer = save(with_markers(kind, normalizer, special=special, seed=seed), tmp_path)
    assert {*TURNS, *MARKERS, "<s>", "</s>"} <= tokenizer.control_tokens.keys()
    assert {"    ", "naïve", "<b>"}.isdisjoint(tokenizer.control_tokens)
    never = tokenizer.control_ids - {tokenizer.id_of("<unk>")}
    for number in range(SAMPLE):
        text = hostile_text(random.Random(number), sorted(tokenizer.control_tokens))
        ids = tokenizer.encode(tokenizer.protect(text), add_special_tokens=False)
        assert never.isdisjoint(ids), text
        if kind in WITH_BYTES and normalizer != "lower case":
            expected = _normal(text.translate(REMOVE_MARKS), normalizer, kind)
            assert _normal(tokenizer.decode(ids), normalizer, kind) == expected, text


def _normal(text: str, normalizer: str, kind: str) -> str:
    """The text as the vocabulary can spell it: sentencepiece writes spaces as ▁, and begins a text with one."""
    if normalizer:
        text = unicodedata.normalize(normalizer, text)  # type: ignore[arg-type]
    return text if kind == "byte level" else text.replace("▁", " ").lstrip(" ")


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_unprotected_text_has_the_ids_of_the_library(kind: str, normalizer: str, seed: int, tmp_path: Path) -> None:
    """With marks around no token, each token of the template, and the text around it, has the usual ids."""
    library = with_markers(kind, normalizer, special=False, seed=seed)
    tokenizer = save(library, tmp_path)
    markers = sorted(tokenizer.control_tokens)
    for number in range(SAMPLE):
        chance = random.Random(number)
        text = f"{make_text(chance)}{chance.choice(markers)}{chance.choice(['', ' ', '  x'])}{chance.choice(markers)}ok"
        expected = library.encode(text, add_special_tokens=True).ids
        assert tokenizer.encode(text, add_special_tokens=True) == expected, text
        assert tokenizer.encode(PROTECT + RELEASE + text, add_special_tokens=True) == expected, text


@pytest.mark.parametrize("kind", ["metaspace", "llama", "gemma"])
def test_a_control_token_with_a_space_is_protected(kind: str, tmp_path: Path) -> None:
    """Sentencepiece writes spaces as ▁, so that other texts become the token."""
    library = KINDS[kind]()
    library.add_tokens([AddedToken("▁<PRE>", normalized=True), AddedToken("▁<SUF>", normalized=False)])
    tokenizer = save(library, tmp_path)
    never = tokenizer.control_ids - {tokenizer.id_of("<unk>")}
    for text in ("x <PRE> y", "<PRE>", "▁<PRE>", " <SUF>", "x▁<SUF>"):
        assert never.isdisjoint(tokenizer.encode(tokenizer.protect(text), add_special_tokens=False)), text


def marked(text: str) -> str:
    return "".join(f"{PROTECT}{letter}{RELEASE}" for letter in text)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_template_that_changes_a_protected_text_gets_no_control_token_of_it(kind: str, tmp_path: Path) -> None:
    """Templates cut texts at a position or at a marker, trim them, and write them in JSON."""
    tokenizer = save(with_markers(kind, "", special=True, seed=0), tmp_path)
    never = tokenizer.control_ids - {tokenizer.id_of("<unk>")}
    for number in range(SAMPLE):
        chance = random.Random(number)
        text = chance.choice(sorted(tokenizer.control_tokens)) + hostile_text(chance, sorted(tokenizer.control_tokens))
        protected = tokenizer.protect(text)
        position = chance.randrange(len(protected) + 1)
        changes = [protected[:position], protected[position:], protected[:position] + "\n" + protected[position:]]
        changes += [protected.strip(), protected.strip(PROTECT + RELEASE), json.dumps(protected)]
        for changed in changes:
            assert never.isdisjoint(tokenizer.encode(changed, add_special_tokens=False)), (text, changed)


def test_a_marker_of_the_template_between_two_parts_of_a_text_stays(tmp_path: Path) -> None:
    tokenizer = save(with_markers("byte level", "", special=True, seed=0), tmp_path)
    marker = sorted(tokenizer.control_tokens)[0]
    protected = tokenizer.protect(f"a{marker}b")
    for position in range(len(protected) + 1):
        prompt = f"{protected[:position]}\n{marker}\n{protected[position:]}"
        assert tokenizer.encode(prompt, add_special_tokens=False).count(tokenizer.control_tokens[marker]) == 1, position


def test_overlapping_spellings_are_marked_as_one() -> None:
    protection = Protection(["<a>", "<a><b>", "<b><c>"])
    assert protection.mark("x<a><b><c>") == f"x{marked('<a><b>')}<c>"
    wide = Protection(["<a>"], {"type": "NFKC"})
    assert wide.mark("<a>\uff1ca>") == marked("<a>\uff1ca>")


def test_the_finder_takes_the_longest_token_and_its_white_space() -> None:
    finder = Finder([AddedToken("<a>"), AddedToken("<a><b>"), AddedToken("[x]", lstrip=True, rstrip=True)])
    assert finder.find("größer 🙂<a><b><a>") == [("<a><b>", 8, 14), ("<a>", 14, 17)]
    assert finder.find("a  [x] b") == [("[x]", 1, 7)]
    assert finder.find("nothing") == finder.find("") == []


@pytest.mark.parametrize("text", ["<unused", "<p>a</p>", "<unused7>"])
def test_protection_is_linear(tmp_path: Path, text: str) -> None:
    """Gemma has thousands of such tokens. Text of a web page has their first character everywhere. The work grows with
    the text at most as fast as its length, and not with the number of tokens."""
    counts = []
    for tokens, length in ((60, 2000), (6000, 2000), (6000, 4000)):
        library = KINDS["byte level"]()
        library.add_tokens([AddedToken(f"<unused{index}>", normalized=False) for index in range(tokens)])
        folder = tmp_path / f"{tokens}-{length}"
        folder.mkdir()
        tokenizer = save(library, folder)
        tokenizer.protect("")
        counts.append(work.steps(lambda: tokenizer.protect(text * length)))  # noqa: B023
    few, many, longer = counts
    assert many <= few + 10
    assert longer < 2.1 * many
