"""Translation of ECMA-262 patterns to Rust's syntax, which llguidance uses."""

from __future__ import annotations

import re

import pytest

from localllm.app.grammar.patterns import PatternProblem, translate

ANY = r"[^\u{A}\u{D}\u{2028}-\u{2029}]"  # any character except line ends
SPACE = (
    r"\u{9}-\u{D}\u{20}\u{2000}-\u{200A}\u{2028}-\u{2029}"
    r"\u{A0}\u{1680}\u{202F}\u{205F}\u{3000}\u{FEFF}"
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("aZ09", "aZ09"),
        ("_é{}]", r"\u{5F}\u{E9}\u{7B}\u{7D}\u{5D}"),
        ("a.b", f"a{ANY}b"),
        (r"\d\D\w\W", r"[0-9][^0-9][0-9A-Z\u{5F}a-z][^0-9A-Z\u{5F}a-z]"),
        (r"\s\S", f"[{SPACE}][^{SPACE}]"),
        (r"\t\n\v\f\r", r"\u{9}\u{A}\u{B}\u{C}\u{D}"),
        (r"\x41\u0041\u{41}", "AAA"),
        (r"\u{1F600}", r"\u{1F600}"),
        (r"\uD7FF\uE000\u{10FFFF}", r"\u{D7FF}\u{E000}\u{10FFFF}"),
        (r"\-\/\.", r"\u{2D}\u{2F}\u{2E}"),
        ("[a-z]", "[a-z]"),
        ("[^a-z]", "[^a-z]"),
        ("[a-a]", "[a]"),
        (r"[a\d]", "[a[0-9]]"),
        (r"[a-\d]", r"[a\u{2D}[0-9]]"),
        ("[-a]", r"[\u{2D}a]"),
        ("[a-]", r"[a\u{2D}]"),
        (r"[\b\]]", r"[\u{8}\u{5D}]"),
        ("[&&]", r"[\u{26}\u{26}]"),
        ("(?i)a1", "[aA][1]"),
        ("(?i)[a-c]", "[a-cA-C]"),
        ("(?i)[X-c]", "[X-cx-zA-C]"),
        ("(?i)[^z]", "[^zZ]"),
        ("(?i)[A-Z]", "[A-Za-z]"),
        ("(?i:a)b", "(?:[aA])b"),
        ("(?i)(a)b", "(?:[aA])[bB]"),
        ("(?<x>a)(?P<y_1>b)(?:c)", "(?:a)(?:b)(?:c)"),
        ("(?:a)*?", "(?:a)*"),
        ("a+?b*c?d{2}e{2,}f{2,3}?", "a+b*c?d{2}e{2,}f{2,3}"),
        ("a{2,3}{", r"a{2,3}\u{7B}"),
        ("a{٣}", r"a\u{7B}\u{663}\u{7D}"),
        (".+[a]+\\d+", f"{ANY}+[a]+[0-9]+"),
        (r"\p{L}\P{Lu}+", r"\p{L}\P{Lu}+"),
        ("a|^b$", "a|^b$"),
    ],
)
def test_translate_keeps_the_meaning(pattern: str, expected: str) -> None:
    assert translate(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(a", "is not closed"),
        ("a)", "unmatched"),
        ("*", "nothing to repeat before *"),
        ("a|+", "nothing to repeat before +"),
        ("a**", "nothing to repeat before *"),
        ("{2}", "nothing to repeat"),
        ("{,2}", "no lower bound"),
        ("a{,2}", "write {0,n}"),
        ("(?=a)", "look-around"),
        ("(?!a)", "look-around"),
        ("(?<=a)", "look-around"),
        ("(?<!a)", "look-around"),
        ("(?#x)", "supported flag: i"),
        ("(?s).", "supported flag: i"),
        ("(?m)a", "supported flag: i"),
        ("(?i", "supported flag: i"),
        ("a(?i)", "allowed only at the start"),
        (r"\b", "look-around"),
        (r"a\B", "look-around"),
        (r"[\B]", "not supported"),
        (r"\1", "backreference"),
        (r"\9", "backreference"),
        (r"\k<x>", "backreference"),
        (r"\01", "is not supported"),
        (r"\Aa\Z", "is not supported"),
        (r"\q", "is not supported"),
        (r"\x4", "two hexadecimal"),
        (r"\c1", "is not supported"),
        (r"\p", "in braces"),
        (r"\p{", "in braces"),
        (r"\u12", "four hexadecimal digits"),
        (r"\u{1234567}", "four hexadecimal digits"),
        (r"\uD800", "not a character"),
        (r"\uDBFF", "not a character"),
        (r"\uDC00\uDC00", "not a character"),
        (r"\uDFFF", "not a character"),
        (r"\uD83D\u0041", "not a character"),
        (r"\u{110000}", "not a character"),
        ("[]", "an empty set"),
        ("[^]a]", "an empty set"),
        ("[b-a]", "ends before its start"),
        ("[a", "unexpected end"),
        ("[a-", "unexpected end"),
        ("\\", "unexpected end"),
        ("(?i)[à-é]", "for ASCII only"),
        ("(?i)é", "for ASCII only"),
        ("(?i)[a-é]", "for ASCII only"),
    ],
)
def test_translate_refuses_an_unsupported_construct_by_name(pattern: str, problem: str) -> None:
    with pytest.raises(PatternProblem, match=re.escape(problem)) as error:
        translate(pattern)
    assert repr(pattern) in str(error.value)


def test_the_error_shows_only_the_beginning_of_a_long_pattern() -> None:
    with pytest.raises(PatternProblem) as error:
        translate("x" * 500 + "*" * 2)
    assert "x" * 100 in str(error.value)
    assert "x" * 101 not in str(error.value)
