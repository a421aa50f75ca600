"""Runs three prompts in one batch on the engine, without a daemon."""

from tokenizers import Tokenizer

from localllm.app.paths import guide_dir
from localllm.backends import choose
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request

files = read_model(guide_dir())
engine = Engine(choose("auto", files).backend.open(files, LoadOptions(max_rows=4)))
tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))

answers: dict[str, list[int]] = {}
for question in ("How do I list the models?", "What is a prefix cache?", "Who are you?"):
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    tokens = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
    engine.submit(Request(question, tokens, max_tokens=60, stop_ids=frozenset(files.eos_ids)))
    answers[question] = []

while engine.has_work:
    for delta in engine.step():
        answers[delta.request_id] += delta.tokens
engine.close()

for question, tokens in answers.items():
    print(f"{question}\n  {tokenizer.decode(tokens)}")
