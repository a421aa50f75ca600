"""The bundled model: its files, its data, its scores, and that what it says about commands is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from localllm.app import config, errors, paths
from localllm.app.chat import template_child
from localllm.app.chat.template_child import Job
from localllm.app.tui.commands import COMMANDS
from localllm.backends import cuda

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # scripts/ is no part of the installed package

from scripts.train_guide import (  # noqa: E402
    corpus,
    evaluate,
    facts,
    grammar,
    intents,
    known_answers,
    noise,
    shape,
    tokenizer,
    train,
)
from scripts.train_guide.chatml import TEMPLATE, render  # noqa: E402
from scripts.train_guide.dataset import Bucket  # noqa: E402
from scripts.train_guide.skills import reference  # noqa: E402

GUIDE = paths.guide_dir()
UNTAUGHT: set[str] = set()  # commands that came after the weights: none once they are trained again
TRAINED_ON = ROOT / "scripts" / "train_guide" / "facts.json"
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


def table_texts() -> list[str]:
    """All answers and commands of the tables."""
    return [text for intent in intents.load().values() for text in (*intent.answers, f"`{intent.command}`")]


def test_files_are_there_and_small() -> None:
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


def test_configs_agree_with_each_other() -> None:
    shape = AutoConfig.from_pretrained(GUIDE)
    words = Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
    generation = json.loads((GUIDE / "generation_config.json").read_text("utf-8"))
    assert shape.model_type == "qwen3"
    assert shape.tie_word_embeddings
    assert shape.vocab_size == words.get_vocab_size()
    assert shape.eos_token_id == words.token_to_id("<|im_end|>")
    assert generation["eos_token_id"] == [words.token_to_id("<|im_end|>"), words.token_to_id("<|endoftext|>")]


def test_tokenizer_covers_any_text_and_reads_digits_one_by_one() -> None:
    words = Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
    text = "naïve 日本語 🙂 \t\n  tabs\u0000 `localllm run`"
    assert words.decode(words.encode(text).ids) == text
    assert words.encode("12345").tokens == list("12345")
    assert words.decode(words.encode("<tool_call>x</tool_call><|im_end|>").ids) == "<tool_call>x</tool_call>"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("length", range(1, len(DIALOGUE) + 1))
def test_template_renders_alike_here_in_the_app_and_in_transformers(
    tools: list[dict[str, object]] | None, length: int
) -> None:
    hugging_face = AutoTokenizer.from_pretrained(GUIDE)
    expected = hugging_face.apply_chat_template(
        DIALOGUE[:length], tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert render(DIALOGUE[:length], tools, generate=True) == expected
    variables = {"messages": DIALOGUE[:length], "tools": tools, "add_generation_prompt": True}
    assert template_child.render(Job(TEMPLATE.read_text("utf-8"), variables, 100_000)).text == expected
    assert (GUIDE / "chat_template.jinja").read_text("utf-8") == TEMPLATE.read_text("utf-8")


def test_template_refuses_unknown_roles() -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role robot"):
        render([{"role": "robot", "content": "beep"}])


def test_every_command_of_the_cli_has_a_dialogue(live: facts.Facts) -> None:
    named = {name for text in table_texts() for name in re.findall(r"localllm ([a-z]+)", text)}
    assert {command.name for command in live.commands} <= named


def test_commands_and_flags_that_answers_name_exist(live: facts.Facts) -> None:
    flags = {command.name: {flag.name for flag in command.flags} | {"--help"} for command in live.commands}
    every = set().union(*flags.values()) | {"--version"}
    slashes = {f"/{name}" for command in COMMANDS for name in (command.name, *command.aliases)}
    for text in table_texts():
        for code in re.findall(r"`([^`]+)`", text):
            match = re.search(r"\blocalllm ([a-z]+)", code)
            assert match is None or match[1] in flags, code
            known = flags[match[1]] if match else every
            assert set(re.findall(r"(?<![\w-])--[a-z-]+", code)) <= known, code
            if re.fullmatch(r"/[a-z]+( .*)?", code) and code.split()[0] not in ("/health", "/metrics"):
                assert code.split()[0] in slashes, code


def test_settings_variables_and_numbers_that_answers_name_are_true() -> None:
    known = {setting.env for setting in config.describe()} | {"LOCALLLM_CONFIG", "LOCALLLM_NAME"}
    for text in table_texts():
        assert set(re.findall(r"LOCALLLM_[A-Z_]+\b", text)) <= known, text
    assert str(config.DEFAULT_PORT) in intents.load()["port"].answers[0]
    settings = config.Settings()
    assert f"`max_rows` ({settings.max_rows})" in intents.load()["queue"].answers[0]
    assert f"`max_queue` ({settings.max_queue})" in intents.load()["queue"].answers[0]
    assert f"{settings.idle_unload:.0f} by default" in intents.load()["idle-unload"].answers[0]
    assert f"{settings.max_body_mib} MiB" in intents.load()["body-limit"].answers[0]


def test_what_newcomers_are_told_is_what_readme_and_code_say() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name, phrases in {
        "install": ["make chat", "Linux", "Python 3.11 or newer"],
        "install-time": ["about 3 minutes the first time", "some 300 MB"],
        "compiler": ["C++20 compiler", "make build"],
        "root": ["stays inside the folder `.venv`"],
        "command-not-found": ["source .venv/bin/activate"],
        "connect-app": ["http://127.0.0.1:11811/v1"],
    }.items():
        for phrase in phrases:
            assert phrase in intents.load()[name].answers[0], name
            assert phrase in readme, phrase
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for hint in ("make PYTHON=python3.12", "apt install python3-venv"):
        assert hint in intents.load()["setup-failed"].answers[0]
        assert hint in makefile
    least = ".".join(map(str, cuda.OLDEST))
    assert f"compute capability {least} or newer" in intents.load()["cuda"].answers[0]


def test_every_error_code_has_a_dialogue() -> None:
    questions = " ".join(line for intent in intents.load().values() for line in intent.what)
    assert set(errors.BY_CODE) <= set(re.findall(r"[a-z_]+", questions))


def test_weights_were_trained_on_commands_that_exist(live: facts.Facts) -> None:
    """Fails when a command or flag the weights speak of is gone, or a command is new: train again, or put it off."""
    trained = facts.Facts.load(TRAINED_ON)
    taught = [command for command in live.commands if command.name not in UNTAUGHT]
    assert [command.name for command in trained.commands] == [command.name for command in taught]
    assert {command.name for command in live.commands} >= UNTAUGHT
    for then, now in zip(trained.commands, taught, strict=True):
        assert {flag.name for flag in then.flags} <= {flag.name for flag in now.flags}
    assert {setting.name for setting in trained.settings} <= {setting.name for setting in live.settings}
    assert {slash.name for slash in trained.slashes} <= {f"/{command.name}" for command in COMMANDS}


def test_facts_survive_their_file(live: facts.Facts, tmp_path: Path) -> None:
    live.save(tmp_path / "facts.json")
    assert facts.Facts.load(tmp_path / "facts.json") == live


def test_known_answers_say_nothing_that_changes_with_the_version() -> None:
    known = json.loads((GUIDE / "answers.json").read_text("utf-8"))
    assert len(known) == known_answers.WANTED == len({one["prompt"] for one in known})
    assert {one["prompt"] for one in known} <= {question.turns[0] for question in evaluate.load(corpus.HELDOUT)}
    for one in known:
        assert not known_answers.CHANGES.search(one["answer"]), one


def test_corpus_is_the_same_for_the_same_seed(live: facts.Facts) -> None:
    def drawn(seed: int, shard: int) -> list[str]:
        return [render(corpus.with_system(c), c.tools or None) for c in corpus.conversations(seed, shard, 200, live)]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(1, 1) != drawn(2, 0)


def test_no_judged_question_is_in_the_corpus(live: facts.Facts) -> None:
    judged = {corpus.normalised(question) for question in corpus.questions(corpus.HELDOUT)}
    asked = {
        corpus.normalised(message["content"])
        for conversation in corpus.conversations(7, 0, 5000, live)
        for message in conversation.messages
        if message["role"] == "user"
    }
    assert len(asked) > 5000
    assert not judged & asked


def test_reserved_questions_would_otherwise_occur(live: facts.Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter does something: without it some judged questions would come up by chance."""
    judged = corpus.reserved()
    monkeypatch.setattr(corpus, "reserved", lambda: frozenset())
    asked = {
        corpus.normalised(message["content"])
        for conversation in corpus.conversations(7, 0, 20_000, live)
        for message in conversation.messages
        if message["role"] == "user"
    }
    assert judged & asked


def test_heldout_is_large_and_apart_from_development() -> None:
    heldout, development = (evaluate.load(file) for file in (corpus.HELDOUT, corpus.DEVELOPMENT))
    assert len(heldout) >= 300
    asked = [
        {" | ".join(corpus.normalised(str(turn)) for turn in q.turns) for q in qs} for qs in (heldout, development)
    ]
    assert not asked[0] & asked[1]
    assert all(q.key and not q.right("") for q in heldout if q.key != ["."])


@pytest.mark.parametrize(
    ("pattern", "number"), [("a", 1), ("(a|b) [c]", 4), ("(a|(b|c) d)", 3), ("[x|y] z", 3), ("a|b", 2)]
)
def test_patterns_count_and_sample(pattern: str, number: int) -> None:
    from random import Random

    random = Random(1)
    assert grammar.count(pattern) == number
    assert len({grammar.sample(pattern, random) for _ in range(200)}) == number


@pytest.mark.parametrize("pattern", ["(a", "a)", "[a", "(a]"])
def test_unbalanced_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="unbalanced"):
        grammar.count(pattern)


def test_wording_varies_but_code_stays() -> None:
    from random import Random

    random, text = Random(3), "how do i use --max-tokens 40 with `localllm run`"
    varied = {noise.disturb(text, random) for _ in range(300)}
    assert len(varied) > 50
    assert all("--max-tokens" in one and "40" in one for one in varied)


def test_typed_keeps_every_word_when_exact() -> None:
    from random import Random

    random = Random(5)
    for _ in range(200):
        said = grammar.typed("repeat after me: krivofan", random, exact=True, bare=True)
        assert "krivofan" in said


def test_flag_answers_say_what_help_says(live: facts.Facts) -> None:
    assert reference.flag_answer("--schema", live).startswith("`--schema` (`localllm run`): ")
    run = next(command for command in live.commands if command.name == "run")
    assert reference.has_answer(run, "--json") == "Yes, `localllm run` takes `--json`."
    assert reference.has_answer(run, "--nonsense").startswith("No, `localllm run` has no `--nonsense`.")


def test_tokenizer_training_makes_digits_and_markers_tokens() -> None:
    small = tokenizer.train_tokenizer(["the cat and the dog 42"] * 3, 300)
    assert small.encode("<|im_start|>42").tokens == ["<|im_start|>", "4", "2"]


@pytest.mark.timeout(150)
def test_smoke_training_makes_a_loadable_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.train_guide.run", "--smoke", "--out", str(tmp_path / "toy")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    curve = json.loads((tmp_path / "toy" / "training.json").read_text("utf-8"))["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"] < 8
    assert AutoConfig.from_pretrained(tmp_path / "toy").model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(tmp_path / "toy").eos_token == "<|im_end|>"


def test_training_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    plan = replace(train.SMOKE, steps=6, tokens_per_batch=64, log_every=2, save_every=2)
    tokens = torch.randint(0, 50, (20, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int16)
    rows = [Bucket(tokens, torch.ones(tokens.shape, dtype=torch.bool))]
    whole, curve = train.train(shape.smoke_config(50), rows, plan, "cpu")
    train.train(shape.smoke_config(50), rows, replace(plan, save_every=4), "cpu", tmp_path / "checkpoint")
    assert torch.load(tmp_path / "checkpoint")["progress"]["step"] == 4  # the last two steps were not saved
    resumed, later = train.train(shape.smoke_config(50), rows, plan, "cpu", tmp_path / "checkpoint")
    assert [entry["loss"] for entry in later] == [entry["loss"] for entry in curve]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("what", ["data", "plan"])
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, what: str) -> None:
    """One of older facts that had ended would else be the new model, without a word."""
    plan = replace(train.SMOKE, steps=2, tokens_per_batch=64, log_every=2, save_every=2)
    tokens = torch.randint(0, 50, (20, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int16)
    learned = torch.ones(tokens.shape, dtype=torch.bool)
    train.train(shape.smoke_config(50), [Bucket(tokens, learned)], plan, "cpu", tmp_path / "checkpoint")
    later = replace(plan, peak=1e-3) if what == "plan" else plan
    others = [Bucket(tokens.flip(0) if what == "data" else tokens, learned)]
    with pytest.raises(SystemExit, match="of another run"):
        train.train(shape.smoke_config(50), others, later, "cpu", tmp_path / "checkpoint")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_scores_on_a_sample_of_heldout_questions() -> None:
    results = evaluate.score(GUIDE, evaluate.load(corpus.HELDOUT, every=6))
    wrong = [(result.question.turns, result.answer) for result in results if not result.right]
    assert len(results) >= 60
    assert len(wrong) <= 0.1 * len(results), wrong


@pytest.mark.usefixtures("one_thread")
def test_what_newcomers_ask_first_is_answered() -> None:
    """Five were answered wrongly once. The first two are taught as they stand, the others are kept from training."""
    first = {
        "How do I install it?": "make chat",
        "How do I install localllm?": "make chat",
        "How do I install it on Linux?": "make chat",
        "how do i set this up": "make chat",
        "print a report about my hardware": "localllm doctor",
        "Is my 4090 used?": "cuda|localllm doctor",
    }
    of_macs = ["in place of torch"]
    questions = [evaluate.Question("newcomer", [asked], [key], never=of_macs) for asked, key in first.items()]
    results = evaluate.score(GUIDE, questions)
    assert not [(result.question.turns, result.answer) for result in results if not result.right]
