"""The built-in model in float32: its greedy text equals transformers, alone and together with other requests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import as_file, files

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from localllm.backends import cpu
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner

from .conformance import Conversation, Planned

PROMPTS, TOKENS = 104, 64


@pytest.fixture(scope="module")
def guide() -> Iterator[ModelFiles]:
    with as_file(files("localllm.assets") / "guide") as folder:
        yield read_model(folder, "guide")


@pytest.fixture(scope="module")
def prompts(guide: ModelFiles) -> list[list[int]]:
    """Prompts in the model's chat template about this program, of increasing length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(guide.path / "tokenizer.json"))
    subjects = ["a model", "the daemon", "my GPU", "an adapter", "the cache", "JSON", "a port", "two numbers"]
    verbs = ["start", "stop", "list", "remove", "explain", "configure", "measure", "share", "name", "update", "add"]
    manners = ["", " quickly", " on a Mac", " without a network", " in Python, please"]
    questions = [f"How do I {verb} {subject}{manner}?" for manner in manners for verb in verbs for subject in subjects]
    chats = [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        for text in questions[:: len(questions) // PROMPTS]
    ]
    return [tokenizer.encode(chat).ids for chat in chats[:PROMPTS]]


@pytest.fixture(scope="module")
def runner(guide: ModelFiles) -> Runner:
    return cpu.open(guide, LoadOptions(context=256, cache_bytes=64 * 2**20, max_rows=16, dtype="float32", threads=1))


@pytest.fixture(scope="module")
def texts(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    """The engine's greedy continuations without end tokens, at most sixteen requests at a time."""
    talk = Conversation(runner)
    for at, prompt in enumerate(prompts):
        talk.submit(str(at), prompt, TOKENS)
    result = talk.finish()
    return [result[str(at)] for at in range(len(prompts))]


@pytest.mark.real
def test_greedy_text_equals_transformers(guide: ModelFiles, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """transformers reads each prompt with our text after it: if its likeliest token is ours at every position, then
    its own greedy text is ours, by induction."""
    assert len(prompts) >= 100
    assert {len(text) for text in texts} == {TOKENS}
    model = AutoModelForCausalLM.from_pretrained(guide.path, dtype=torch.float32)
    for length in sorted({len(prompt) for prompt in prompts}):
        group = [at for at, prompt in enumerate(prompts) if len(prompt) == length]
        whole = torch.tensor([prompts[at] + texts[at] for at in group])
        with torch.inference_mode():
            logits = model(whole).logits[:, length - 1 : -1]
        margins = logits.topk(2).values.diff(dim=-1).abs().amin(dim=(1, 2)).tolist()
        for at, likeliest, margin in zip(group, logits.argmax(-1).tolist(), margins, strict=True):
            assert likeliest == texts[at], f"prompt {at}; smallest margin {margin}"


@pytest.mark.real
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
def test_sixteen_that_join_and_leave_equal_solo_runs(
    runner: Runner, prompts: list[list[int]], texts: list[list[int]], overlap: bool
) -> None:
    rng = np.random.default_rng(0)
    talk = Conversation(Planned(runner, overlap=overlap))
    chosen = rng.choice(len(prompts), 16, replace=False).tolist()
    lengths = {at: int(rng.integers(8, TOKENS + 1)) for at in chosen}
    left: list[int] = []
    waiting = list(chosen)
    while waiting or talk.engine.has_work:
        if waiting and rng.random() < 0.4:
            at = waiting.pop()
            talk.submit(str(at), prompts[at], lengths[at])
        if len(left) < 4 and rng.random() < 0.05 and talk.engine.has_work:
            leaving = int(rng.choice([int(name) for name in talk.tokens]))
            left += [leaving] * talk.engine.cancel(str(leaving))
        talk.step()
    for at in chosen:
        result = talk.tokens[str(at)]
        assert result == texts[at][: len(result)]
        assert at in left or len(result) == lengths[at]
