"""The bundled model: its files, its data, its facts and its scores."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import jinja2
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from localllm.app import config, paths
from localllm.app.chat.template import child
from localllm.app.chat.template.child import Job

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # scripts/ is no part of the installed package

from scripts.train_guide import corpus, evaluate, facts, grammar, known_answers, noise, tokenizer, topics  # noqa: E402
from scripts.train_guide.chatml import TEMPLATE, render  # noqa: E402

GUIDE = paths.guide_dir()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter in Köln & <anderswo>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Is it "warm" in Köln & Bonn?'},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
            for city in ("Köln", "Bonn")
        ],
    },
    {"role": "tool", "content": '{"temperature": 21}'},
    {"role": "tool", "content": '{"temperature": 22}'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def live() -> facts.Facts:
    return facts.collect()


def test_the_folder_has_all_files_and_is_small() -> None:
    names = {file.name for file in GUIDE.iterdir()}
    assert names == {
        "README.md",
        "answers.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert sum(file.stat().st_size for file in GUIDE.iterdir()) <= 40 * 10**6


def test_the_configurations_agree_with_the_tokenizer() -> None:
    shape = AutoConfig.from_pretrained(GUIDE)
    rust = Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
    generation = json.loads((GUIDE / "generation_config.json").read_text("utf-8"))
    assert shape.model_type == "qwen3"
    assert shape.tie_word_embeddings
    assert shape.vocab_size == rust.get_vocab_size()
    assert shape.eos_token_id == rust.token_to_id("<|im_end|>")
    assert generation["eos_token_id"] == [rust.token_to_id("<|im_end|>"), rust.token_to_id("<|endoftext|>")]


def test_the_tokenizer_encodes_any_text_and_each_digit_alone() -> None:
    rust = Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
    text = "naïve 日本語 🙂 \t\n  tabs\u0000 `localllm run`"
    assert rust.decode(rust.encode(text).ids) == text
    assert rust.encode("12345").tokens == list("12345")
    assert rust.decode(rust.encode("<tool_call>x</tool_call><|im_end|>").ids) == "<tool_call>x</tool_call>"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("length", range(1, len(DIALOGUE) + 1))
def test_the_template_renders_equally_in_training_app_and_transformers(
    tools: list[dict[str, object]] | None, length: int
) -> None:
    hugging_face = AutoTokenizer.from_pretrained(GUIDE)
    expected = hugging_face.apply_chat_template(
        DIALOGUE[:length], tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert render(DIALOGUE[:length], tools, generate=True) == expected
    variables = {"messages": DIALOGUE[:length], "tools": tools, "add_generation_prompt": True}
    assert child.render(Job(TEMPLATE.read_text("utf-8"), variables, 100_000)).text == expected


def test_the_template_refuses_unknown_roles() -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role robot"):
        render([{"role": "robot", "content": "beep"}])


def test_the_facts_have_every_command_flag_setting_key_and_route(live: facts.Facts) -> None:
    from localllm.app.cli import cli
    from localllm.app.tui.commands import COMMANDS

    names = set(live.table)
    assert {f"command {name}" for name in cli.commands} | {"command adapters load"} <= names
    assert {f"setting {setting.name}" for setting in config.describe()} <= names
    assert {f"slash {command.name}" for command in COMMANDS} <= names
    assert {"flag --adapter", "key Ctrl+R", "route /v1/chat/completions", "error port_taken", "make chat"} <= names
    assert live.table["command adapters load"].answer.startswith("`localllm adapters load FOLDER|FILE|ORG/REPO`: Load")
    assert str(config.DEFAULT_PORT) in live.table["setting port"].answer


def test_every_topic_has_an_answer_without_invented_names(live: facts.Facts) -> None:
    """A command, setting or page that the program no longer has leaves its topic without an answer."""
    for name, fact in live.table.items():
        assert not live.invented(fact.answer), (name, fact.answer)
    for topic in topics.load():
        answer = live.answer(topic)
        assert answer, f"{topic.file}: the program has no {topic.name}"
        assert not live.invented(answer), (topic.name, answer)
        lines = [*topic.how, *topic.what, *topic.ask, *(line for after in topic.after.values() for line in after)]
        assert not re.findall(r"{\w+}", topics.filled(" ".join(lines), Random(1))), topic.name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`localllm run --json`", []),
        ("`localllm run --fold`", ["--fold"]),
        ("`localllm ps --schema`", ["--schema"]),  # a flag of another command
        ("`localllm fold --json`", ["localllm fold"]),
        ("`localllm adapters load ./x --pin`", []),
        ("`LOCALLLM_PORT`", []),
        ("`LOCALLLM_FOLD`", ["LOCALLLM_FOLD"]),
        ("`LOCALLLM_DEV_SELF_TEST`", []),
        ("`/new` and `/fold`", ["/fold"]),
        ("`/health`, `/v1/models`, `/v1/fold`", ["/v1/fold"]),
        ("`F2` and `F9` and `Ctrl+R`", ["F9"]),
        ("I do not know `--seed`. `localllm COMMAND --help` lists the flags.", ["--seed"]),
        ("I do not know the command `localllm adapters`. `localllm --help` lists all.", ["adapters"]),
        ("I do not know the command `localllm fold`. `localllm --help` lists all.", []),
    ],
)
def test_false_answers_are_recognised(live: facts.Facts, text: str, names: list[str]) -> None:
    assert evaluate.falsehoods(text, live) == names


def test_changed_facts_are_listed(live: facts.Facts, tmp_path: Path) -> None:
    table = {"facts": evaluate.checksums(live) | {"setting port": 1, "command fold": 2}}
    (tmp_path / "training.json").write_text(json.dumps(table), "utf-8")
    assert evaluate.changes(tmp_path, live) == ["command fold", "setting port"]


def test_facts_loaded_from_a_file_equal_the_saved_facts(live: facts.Facts, tmp_path: Path) -> None:
    live.save(tmp_path / "facts.json")
    assert facts.Facts.load(tmp_path / "facts.json") == live


def test_known_answers_name_nothing_that_changes_with_the_version() -> None:
    known = json.loads((GUIDE / "answers.json").read_text("utf-8"))
    assert len(known) == known_answers.COUNT == len({one["prompt"] for one in known})
    assert {one["prompt"] for one in known} <= {question.turns[0] for question in evaluate.load(corpus.HELDOUT)}
    for one in known:
        assert not known_answers.CHANGES.search(one["answer"]), one


def test_corpus_is_the_same_for_the_same_seed(live: facts.Facts) -> None:
    def sample(seed: int, shard: int) -> list[str]:
        return [one.render() for one in corpus.conversations(seed, shard, 200, live)]

    assert sample(1, 0) == sample(1, 0)
    assert sample(1, 0) != sample(1, 1) != sample(2, 0)


def test_the_corpus_contains_no_held_out_question(live: facts.Facts) -> None:
    reserved = {corpus.normalised(question) for question in corpus.questions(corpus.HELDOUT)}
    questions = {
        corpus.normalised(message["content"])
        for conversation in corpus.conversations(7, 0, 5000, live)
        for message in conversation.messages
        if message["role"] == "user"
    }
    assert len(questions) > 5000
    assert not reserved & questions


def test_without_the_filter_the_corpus_would_contain_reserved_questions(
    live: facts.Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the filter has an effect."""
    reserved = corpus.reserved()
    monkeypatch.setattr(corpus, "reserved", lambda: frozenset())
    questions = {
        corpus.normalised(message["content"])
        for conversation in corpus.conversations(7, 0, 20_000, live)
        for message in conversation.messages
        if message["role"] == "user"
    }
    assert reserved & questions


def test_held_out_and_development_questions_are_disjoint() -> None:
    heldout, development = (evaluate.load(file) for file in (corpus.HELDOUT, corpus.DEVELOPMENT))
    assert len(heldout) >= 300
    texts = [{" | ".join(map(corpus.normalised, q.turns)) for q in questions} for questions in (heldout, development)]
    assert not texts[0] & texts[1]
    assert not any(question.right("") for question in heldout)


def test_a_refusal_is_right_only_if_the_key_is_one() -> None:
    answer = "I do not know the command `localllm fit`. `localllm --help` lists all commands."
    assert not evaluate.Question("store", ["?"], "localllm fit").right(answer)
    assert evaluate.Question("unknown", ["?"], "do not know").right(answer)


def test_the_corpus_refuses_only_names_that_do_not_exist(live: facts.Facts) -> None:
    writer = corpus.Writer(live, Random(9))
    exchanges = [writer._invented() for _ in range(3000)]
    refusals = [answer for _, answer in exchanges if answer.startswith("I do not know")]
    assert len(refusals) > 2000
    assert not [answer for answer in refusals if evaluate.falsehoods(answer, live)]
    assert not [question for question, _ in exchanges if "{" in question]


def test_keys_are_written_in_the_ways_of_people() -> None:
    random = Random(4)
    assert {"Ctrl+K", "ctrl k", "ctrl-k", "control k"} <= {grammar.spelled("Ctrl+K", random) for _ in range(300)}
    assert {"F2", "f2"} == {grammar.spelled("F2", random) for _ in range(50)}


def test_each_key_of_a_row_has_its_own_purpose(live: facts.Facts) -> None:
    assert live.table["key Ctrl+X"].purposes == ("delete a model or an adapter", "cancel a download")
    assert live.table["key k"].purposes == ("copy its code block on a message",)


@pytest.mark.parametrize(
    ("pattern", "number"), [("a", 1), ("(a|b) [c]", 4), ("(a|(b|c) d)", 3), ("[x|y] z", 3), ("a|b", 2)]
)
def test_a_pattern_counts_and_samples_all_its_sentences(pattern: str, number: int) -> None:
    random = Random(1)
    assert grammar.count(pattern) == number
    assert len({grammar.sample(pattern, random) for _ in range(200)}) == number


@pytest.mark.parametrize("pattern", ["(a", "a)", "[a", "(a]"])
def test_unbalanced_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="unbalanced"):
        grammar.count(pattern)


def test_disturb_varies_words_but_keeps_code() -> None:
    random, text = Random(3), "how do i use --max-tokens 40 with `localllm run`"
    varied = {noise.disturb(text, random) for _ in range(300)}
    assert len(varied) > 50
    assert all("--max-tokens" in one and "40" in one for one in varied)


def test_typed_keeps_the_words_if_exact() -> None:
    random = Random(5)
    for _ in range(200):
        said = grammar.typed("repeat after me: krivofan", random, exact=True, bare=True)
        assert "krivofan" in said


def test_tokenizer_training_makes_each_digit_and_marker_a_token() -> None:
    small = tokenizer.train_tokenizer(["the cat and the dog 42"] * 3, 300)
    assert small.encode("<|im_start|>42").tokens == ["<|im_start|>", "4", "2"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_smoke_run_trains_a_model_and_adapters_that_load(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.train_guide.run", "--smoke", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=500)
    curve = json.loads((tmp_path / "guide" / "training.json").read_text("utf-8"))["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"] < 8
    assert AutoConfig.from_pretrained(tmp_path / "guide").model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(tmp_path / "guide").eos_token == "<|im_end|>"
    assert {file.name for file in (tmp_path / "adapters").iterdir()} == {"pirate", "steps"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("every", "min_questions"), [(24, 15), pytest.param(6, 60, marks=pytest.mark.slow)])
def test_scores_on_a_sample_of_heldout_questions(every: int, min_questions: int) -> None:
    results = evaluate.score(GUIDE, evaluate.load(corpus.HELDOUT, every=every))
    wrong = [(result.question.turns, result.answer) for result in results if not result.right]
    assert len(results) >= min_questions
    assert len(wrong) <= 0.1 * len(results), wrong


@pytest.mark.usefixtures("one_thread")
def test_frequent_questions_of_newcomers_are_answered(live: facts.Facts) -> None:
    """Earlier versions of guide answered them wrongly."""
    first = {
        "How do I install it?": "make chat",
        "how do i set this up": "make chat",
        "print a report about my hardware": "localllm doctor",
        "Can you load adapters?": "localllm adapters",
        "How do I load a LoRA?": "adapters load",
        "Does it run GGUF files?": "llamacpp|gguf",
        "What does F2 do?": "/model",
        "What does F5 do?": "/adapter",
        "Will a 7B model fit?": "localllm fit",
    }
    questions = [evaluate.Question("newcomer", [asked], key) for asked, key in first.items()]
    results = evaluate.score(GUIDE, questions)
    assert not [(result.question.turns, result.answer) for result in results if not result.right]
    assert not evaluate.report(results, live)["false"]
