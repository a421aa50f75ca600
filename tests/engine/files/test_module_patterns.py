"""Regular expressions of adapter_config.json: matched as Python's `re` matches them, without its exponential time."""

from __future__ import annotations

import random
import re

import pytest

from localllm.engine.files.module_patterns import ModulePattern, NamePattern, PatternProblem, Steps

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "layers.1.mlp.gate",
    "lm_head",
    "a_b.aab.",
    "x\n",
    "é1.Ａ",
)
# The regular expression that Unsloth writes for target_modules.
UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch_embed|language|text).*?(?:self_attn|attention|attn|mlp|ffn|dense)"
    r".*?(?:k_proj|v_proj|q_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|ffn|dense)\.(?:(?:k_proj|v_proj|q_proj)))"
)
PATTERNS = (
    UNSLOTH,
    r"^(model(?=\.).*\.(q_proj|down_proj))$",
    r"^(?!.*mlp).*(q_proj)$",
    r".*(?<!gate|down)_proj",
    r".*(?<!self)_attn.*",
    r"(?P<whole>.*\.\d{2,}\..*)",
    r"[^.]+",
    r"[\w.]*?_proj\Z",
    r"\Amodel.*",
    r"x",
    r"x$",
    r".*?\W\w+",
    r"\w\d\S\D",
    r"(a|aa|_|b|\.){3,}",
    r"(?!)|lm_head",
    "",
)


@pytest.mark.parametrize("text", PATTERNS)
def test_expression_matches_as_re_does(text: str) -> None:
    pattern = ModulePattern(text, Steps())
    for name in NAMES:
        assert pattern.fullmatch(name) == bool(re.fullmatch(text, name)), name
        assert pattern.match(name) == bool(re.match(text, name)), name


ATOMS = ("a", "b", "_proj", r"\.", ".", "[a-z]", "[^.]", r"\d", r"\w", "(a|b)", "(?:layers|mlp)", "model", r"[\d_]")
PLACES = ("^", "$", r"\b", r"\B", "(?=.*q)", "(?!.*q)", "(?<=a)", "(?<!s)")
COUNTS = ("", "", "", "*", "+", "?", "{2}", "{1,3}", "*?", "{,2}")


def random_expression(rng: random.Random, depth: int = 0) -> str:
    text = ""
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.15:
            text += rng.choice(PLACES)
        elif kind < 0.8 or depth > 1:
            text += rng.choice(ATOMS) + rng.choice(COUNTS)
        else:
            text += f"({random_expression(rng, depth + 1)})" + rng.choice(("", "?", "{2}"))
    return text if rng.random() < 0.8 else f"{text}|{random_expression(rng, depth + 1)}"


def test_random_expressions_match_as_re_does() -> None:
    rng = random.Random(4)
    for _ in range(500):
        text = random_expression(rng)
        pattern = ModulePattern(text, Steps())
        for name in NAMES:
            assert pattern.fullmatch(name) == bool(re.fullmatch(text, name)), (text, name)


def test_expression_that_is_exponential_in_re_ends() -> None:
    assert not ModulePattern("((a+)+)+b", Steps()).fullmatch("a" * 300)
    assert not NamePattern("((a|a)*)*b", Steps()).match("a" * 300)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"(a)\1", "groupref of regular expressions are not supported"),
        ("(?i)a", "inline flags"),
        ("a(?i:b)", "inline flags"),
        ("a++", "possessive repeat"),
        ("(?>a)", "atomic group"),
        ("(a", "is malformed: missing \\)"),
        ("(" * 5000 + ")" * 5000, "malformed"),
        ("a" * 10_001, "more than 10000 characters"),
    ],
)
def test_construct_that_is_not_supported_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PatternProblem, match=reason):
        ModulePattern(text, Steps())


def test_number_of_keys_is_limited() -> None:
    steps = Steps(1000)
    patterns = [NamePattern(f"layers.{key}", steps) for key in range(2)]
    with pytest.raises(PatternProblem, match="take too long"):
        patterns[0].match("model.layers.0")


def test_matches_that_take_too_long_are_refused() -> None:
    pattern = ModulePattern(".*a.*b.*", Steps(100))
    with pytest.raises(PatternProblem, match="take too long"):
        pattern.fullmatch("ab" * 50)
