"""The built-in adapters: their files, the rules of their styles, their training, and their answers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from localllm.app import paths
from localllm.app.errors import InvalidRequest
from localllm.app.store import resolved
from localllm.app.store.changes import deletion
from localllm.app.store.local import snapshots
from localllm.backends import cpu
from localllm.engine.engine import Engine
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # scripts/ is no part of the installed package

from scripts.train_guide import adapters, corpus, facts, styles, train  # noqa: E402
from scripts.train_guide.chatml import END, render  # noqa: E402
from scripts.train_guide.dataset import Bucket  # noqa: E402

GUIDE = paths.guide_dir()
FOLDER = paths.builtin_adapters_dir()
NAMES = list(adapters.RANKS)
ANSWER = 'Yes, `localllm run` is for you. It answers "yes, you" and no. Try `localllm run guide "Hi. You"`!'

UNCHANGED = [
    '{"a": "b c."}',
    "<tool_call>\n{}\n</tool_call>",
    "- a b.\n- c d.",
    "1. red\n2. blue",
    "```sh\nls .\n```",
    "ok",
]


def test_the_folder_has_two_adapters_of_at_most_4_mb() -> None:
    files = {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*") if file.is_file()}
    contents = ("adapter_config.json", "adapter_model.safetensors", "training.json")
    assert files == {"README.md", *(f"{name}/{file}" for name in NAMES for file in contents)}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 4 * 10**6
    assert {name: read_adapter(FOLDER / name).rank for name in NAMES} == adapters.RANKS == {"pirate": 16, "steps": 8}
    assert {read_adapter(FOLDER / name).base for name in NAMES} == {"guide"}


def test_the_store_lists_the_adapters_and_deletes_none() -> None:
    assert [(ref.id, ref.path, ref.description) for ref in snapshots.adapters() if ref.bundled] == [
        (name, FOLDER / name, "guide") for name in NAMES
    ]
    assert resolved.adapter("steps").path == FOLDER / "steps"
    with pytest.raises(InvalidRequest, match="built in"):
        deletion.plan_adapter_removal("steps")


def test_styles_rewrite_sentences_and_keep_code() -> None:
    assert styles.to_steps(ANSWER) == (
        '1. Yes, `localllm run` is for you.\n2. It answers "yes, you" and no.\n3. Try `localllm run guide "Hi. You"`!'
    )
    assert styles.to_pirate(ANSWER) == (
        'Ahoy! Aye, `localllm run` is for ye. It answers "yes, you" an\' no. Try `localllm run guide "Hi. You"`, matey!'
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", UNCHANGED)
def test_styles_keep_code_data_and_lists(name: str, answer: str) -> None:
    style = styles.STYLES[name]
    assert style.apply(answer) == answer == style.plain(answer)
    assert not style.matches(answer)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_text_of_each_rewritten_answer_is_the_answer(name: str) -> None:
    style = styles.STYLES[name]
    conversations = corpus.conversations(3, 0, 1000, facts.collect())
    answers = [
        message["content"] for one in conversations for message in one.messages if message["role"] == "assistant"
    ]
    prose = list(filter(styles.is_prose, answers))
    assert len(prose) > len(answers) / 2
    for answer in answers:
        assert style.plain(style.apply(answer)) == answer
    for answer in prose:
        assert style.matches(style.apply(answer)), answer
        assert not style.matches(answer), answer


def test_no_conversation_may_contain_a_held_out_prompt() -> None:
    prompts = {corpus.normalised(prompt) for prompt in styles.prompts()}
    assert len(prompts) == styles.HELD_OUT_PROMPTS
    assert prompts <= corpus.reserved()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # raised by peft
def test_training_changes_only_the_factors_and_peft_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(train.shape(train.SMOKE, 50)).eval()
    model.save_pretrained(tmp_path / "base")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    tokens = torch.randint(0, 50, (20, 16), dtype=torch.int16)
    plain = model(tokens.long()).logits
    adapters.attach(model, 4)
    assert torch.equal(model(tokens.long()).logits, plain)
    plan = replace(adapters.SMOKE, steps=4, tokens_per_batch=64)
    train.fit(model, [Bucket(tokens, torch.ones(tokens.shape, dtype=torch.bool))], plan, "cpu")
    after = {name.replace(".base.", "."): parameter for name, parameter in model.named_parameters()}
    assert all(torch.equal(after[name], parameter) for name, parameter in before.items())
    adapters.save(model, 4, tmp_path / "adapter")
    with torch.no_grad():
        for factor in adapters.factors(model).values():
            factor.copy_(factor.bfloat16())
        peft_model = peft.PeftModel.from_pretrained(
            Qwen3ForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")
        )
        actual = model.eval()(tokens.long()).logits
        torch.testing.assert_close(peft_model(tokens.long()).logits, actual)
    assert (actual - plain).abs().max() > 0.01


class Answers:
    """Greedy answers of guide and of both adapters, in one engine."""

    def __init__(self, folder: Path) -> None:
        options = LoadOptions(context=256, cache_bytes=64 * 2**20, max_rows=12, dtype="float32", threads=1)
        self.engine = Engine(cpu.open(read_model(GUIDE, "guide"), options))
        self.tokenizer = Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
        for name in NAMES:
            version = read_adapter(folder / name).version
            self.engine.register_adapter(Adapter(name, str(folder / name), version))

    def submit(self, prompt: str, adapter: str = "") -> str:
        text = render([{"role": "user", "content": prompt}], generate=True)
        request = Request(
            id=f"{adapter}|{prompt}",
            prompt=tuple(self.tokenizer.encode(text).ids),
            max_tokens=150,
            sampling=Sampling(logprobs=0),
            stop_ids=frozenset({self.tokenizer.token_to_id(END)}),
            adapter=self.engine.find_adapter(adapter),
        )
        self.engine.submit(request)
        return request.id

    def finish(self) -> dict[str, list[tuple[int, float]]]:
        """The tokens of each request, with their log-probabilities."""
        answers: dict[str, list[tuple[int, float]]] = {}
        while self.engine.has_work:
            for delta in self.engine.step():
                drawn = [(entry.token, entry.logprob) for entry in delta.logprobs]
                answers.setdefault(delta.request_id, []).extend(drawn)
        return answers

    def text(self, tokens: list[tuple[int, float]]) -> str:
        return self.tokenizer.decode([token for token, _ in tokens])


def check_styles(folder: Path, prompts: list[str]) -> None:
    """Each adapter of a folder answers 95 % of the prompts in its style, beside the unchanged base."""
    answers = Answers(folder)
    for prompt in prompts:
        answers.submit(prompt)
    alone = answers.finish()
    for prompt in prompts:
        for adapter in ("", *NAMES):
            answers.submit(prompt, adapter)
    beside = answers.finish()
    base = [f"|{prompt}" for prompt in prompts]
    for name in base:
        assert [token for token, _ in beside[name]] == [token for token, _ in alone[name]], name
        # The number of rows in a step may change the last bits.
        logprobs = [logprob for _, logprob in alone[name]]
        assert [logprob for _, logprob in beside[name]] == pytest.approx(logprobs, abs=1e-4), name
    for adapter in NAMES:
        style = styles.STYLES[adapter]
        styled = [style.matches(answers.text(beside[f"{adapter}|{prompt}"])) for prompt in prompts]
        assert sum(styled) >= int(0.95 * len(prompts)), adapter  # rounded down, because a prompt may ask for code
        assert not any(style.matches(answers.text(alone[name])) for name in base)


@pytest.mark.real
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_adapters_answer_in_their_style_beside_the_unchanged_base(every: int) -> None:
    check_styles(FOLDER, styles.prompts()[::every])


def test_adapters_of_zeros_have_no_style(tmp_path: Path) -> None:
    """Proves that the check above notices adapters without effect."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        config = (FOLDER / name / "adapter_config.json").read_text("utf-8")
        (tmp_path / name / "adapter_config.json").write_text(config, "utf-8")
        factors = load_file(FOLDER / name / "adapter_model.safetensors")
        zeros = {key: torch.zeros_like(factor) for key, factor in factors.items()}
        save_file(zeros, tmp_path / name / "adapter_model.safetensors")
    with pytest.raises(AssertionError, match="pirate"):
        check_styles(tmp_path, styles.prompts()[:3])
