"""The worker process with a real model, backend and socket."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from localllm.app import frames, paths
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.frames import Failed, Finished, Generate, ResponseFormat, Started
from localllm.engine.options import LoadOptions

from ..chat.tokenizer.vocabularies import vocabulary
from ..tiny_qwen import VOCAB, write_model
from .worker_process import Result, WorkerProcess

CONTEXT = 512
END = 2
HI = [{"role": "user", "content": "hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "greet", "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]

_ids = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), context=CONTEXT)


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[WorkerProcess]:
    """One worker for all tests, so that the tests detect a request that breaks a later one."""
    made = WorkerProcess()
    loaded = made.load(folder)
    assert isinstance(loaded, frames.Loaded), loaded
    yield made
    made.send(frames.Shutdown())
    code, log = made.close()
    assert (code, "Traceback" in log) == (0, False), log


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder)


def ask(**fields: Any) -> Generate:
    if "prompt" not in fields:
        fields.setdefault("messages", HI)
    return Generate(id=f"r{next(_ids)}", **fields)


def one(worker: WorkerProcess, **fields: Any) -> Result:
    (result,) = worker.generate(ask(**fields))
    return result


def test_model_info(folder: Path) -> None:
    worker = WorkerProcess()
    info = worker.load(folder, context=128, cache_bytes=2**20).info
    assert (info.model, info.backend, info.vocab, info.context) == ("tiny", "cpu", VOCAB, 128)
    assert info.dtype
    assert info.device
    assert info.reason
    assert info.weight_bytes >= (folder / "model.safetensors").stat().st_size * 0.4
    assert 0 < info.cache_bytes <= 2**20
    assert info.cache_tokens >= 128
    worker.send(frames.Shutdown())
    assert worker.close()[0] == 0


def test_load_limit_grows_with_the_weights(folder: Path) -> None:
    worker, stages = WorkerProcess(), list[frames.Loading]()
    worker.send(
        frames.Load(model="tiny", path=str(folder), backend="cpu", options=LoadOptions(threads=1, cache_bytes=2**20))
    )
    while isinstance(frame := worker.read(), frames.Loading):
        stages.append(frame)
    size = (folder / "model.safetensors").stat().st_size
    assert [stage.more for stage in stages if stage.stage == "loading the weights (cpu)"] == [
        pytest.approx(size / 20e6, rel=0.1)
    ]
    worker.close()


def test_quant_option_quantises_the_weights(folder: Path) -> None:
    worker = WorkerProcess()
    info = worker.load(folder, cache_bytes=2**20, quant="int8").info
    assert info.quant == "int8"
    assert info.weight_bytes < 1.6 * (folder / "model.safetensors").stat().st_size
    assert one(worker, temperature=0.0, max_tokens=8).end.completion_tokens == 8
    worker.send(frames.Shutdown())
    assert worker.close()[0] == 0


def test_ops_option(folder: Path) -> None:
    worker = WorkerProcess()
    worker.load(folder, cache_bytes=2**20, ops=("all=reference",))
    assert one(worker, temperature=0.0, max_tokens=8).end.completion_tokens == 8
    worker.send(frames.Shutdown())
    assert worker.close()[0] == 0


def test_unknown_op_is_refused_by_name(folder: Path) -> None:
    worker = WorkerProcess()
    refused = worker.load(folder, ops=("nrm.rms=reference",))
    assert isinstance(refused, frames.LoadFailed)
    assert "nrm.rms" in refused.fault.message
    assert refused.fault.hint == "did you mean norm.rms?"
    worker.close()


def test_unknown_attention_is_refused_by_name(folder: Path) -> None:
    worker = WorkerProcess()
    refused = worker.load(folder, attention="flashinfer", backend="cpu")
    assert isinstance(refused, frames.LoadFailed)
    assert refused.fault.message == "attention flashinfer is not supported on cpu"
    assert refused.fault.hint == "set attention to auto; localllm config tiny shows the settings of this model"
    worker.close()


def test_chat(worker: WorkerProcess, tokenizer: ChatTokenizer) -> None:
    result = one(worker, temperature=0.0, max_tokens=24, logprobs=0)
    prompt = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert result.started == Started(id=result.end.id, prompt_tokens=len(prompt))
    assert result.finish() == "length"
    assert isinstance(result.end, Finished)
    assert (result.end.prompt_tokens, result.end.completion_tokens) == (len(prompt), 24)
    ids = [entry.id for entry in result.logprobs()]
    assert len(ids) == 24
    assert result.text() == tokenizer.decode(ids, hidden=tokenizer.special_ids)
    again = one(worker, temperature=0.0, max_tokens=24)
    assert again.text() == result.text()
    assert again.end.cached_tokens > 0


def test_text_of_a_byte_fallback_vocabulary(tmp_path: Path) -> None:
    """Characters of several byte tokens, and leading spaces of a continued text."""
    folder = write_model(tmp_path / "model")
    words = vocabulary("llama", tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "llama" / file, folder / file)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    worker = WorkerProcess()
    worker.load(folder, cache_bytes=2**20)
    flags = one(
        worker,
        prompt="a",
        max_tokens=60,
        logprobs=0,
        response_format=ResponseFormat(kind="choice", choices=["🇫🇷🇯🇵 ok"]),
    )
    assert flags.text() == "🇫🇷🇯🇵 ok"
    assert b"".join(bytes(entry.bytes) for entry in flags.logprobs()).decode() == "🇫🇷🇯🇵 ok"
    cut = one(worker, prompt="a", max_tokens=6, response_format=ResponseFormat(kind="choice", choices=["🇫🇷🇯🇵 ok"]))
    assert cut.text() == "🇫\ufffd\ufffd"
    spaced = one(worker, max_tokens=60, response_format=ResponseFormat(kind="regex", regex=" fox, (ü|ö)"))
    assert spaced.text() in (" fox, ü", " fox, ö")
    ids = words.encode("🇫🇷 ok", add_special_tokens=False)
    assert worker.ask(frames.Detokenize(id="d", tokens=ids)).text == "🇫🇷 ok"
    assert worker.ask(frames.Detokenize(id="e", tokens=ids[:-3])).text.startswith("🇫")
    (free,) = worker.generate(ask(prompt="the quick", max_tokens=60, temperature=2.0, seed=1, logprobs=0))
    before = words.encode("the quick", add_special_tokens=False)
    given = [entry.id for entry in free.logprobs()]
    whole = words.decode(before + given, hidden=words.special_ids)
    assert "the quick" + free.text() == whole
    assert worker.close()[0] == 0


def test_text_equals_the_decoding_of_all_tokens(worker: WorkerProcess, tokenizer: ChatTokenizer) -> None:
    results = worker.generate(*(ask(prompt="x", seed=seed, max_tokens=60, logprobs=0) for seed in range(8)))
    for result in results:
        ids = [entry.id for entry in result.logprobs()]
        assert result.text() == tokenizer.decode(ids, hidden=tokenizer.special_ids)
        assert sum(piece.tokens for piece in result.pieces()) == len(ids)


def test_choices_have_consecutive_seeds(worker: WorkerProcess) -> None:
    together = one(worker, n=3, seed=5, max_tokens=12)
    alone = [one(worker, seed=5 + index, max_tokens=12).text() for index in range(3)]
    assert [together.text(index) for index in range(3)] == alone
    assert len(set(alone)) == 3
    assert together.end.completion_tokens == 36


def test_answers_without_a_seed_differ(worker: WorkerProcess) -> None:
    assert len({one(worker, max_tokens=12).text() for _ in range(4)}) > 1


def test_concurrent_requests_equal_solo_requests(worker: WorkerProcess) -> None:
    fields = [{"prompt": f"number {index}", "seed": index, "max_tokens": 10 + index % 7} for index in range(20)]
    together = worker.generate(*(ask(**options) for options in fields))
    for options, result in zip(fields, together, strict=True):
        assert result.text() == one(worker, **options).text()


def test_stop_string_across_tokens(worker: WorkerProcess) -> None:
    free = one(worker, prompt="x", seed=3, max_tokens=40).text()
    stop = free[7:11]
    result = one(worker, prompt="x", seed=3, max_tokens=40, stop=["never there", stop])
    assert result.text() == free[: free.index(stop)]
    assert result.finish() == "stop"
    assert result.end.completion_tokens < 40


def test_stop_ids(worker: WorkerProcess) -> None:
    free = [entry.id for entry in one(worker, prompt="x", seed=3, max_tokens=20, logprobs=0).logprobs()]
    stop_id = next(token for token in free[5:])
    result = one(worker, prompt="x", seed=3, max_tokens=20, stop_ids=[stop_id], logprobs=0)
    assert [entry.id for entry in result.logprobs()] == free[: free.index(stop_id)]
    assert result.finish() == "stop"


def test_ignore_eos(worker: WorkerProcess) -> None:
    forced = {"logit_bias": {END: 100.0}, "max_tokens": 5}
    result = one(worker, **forced)
    assert (result.text(), result.finish(), result.end.completion_tokens) == ("", "stop", 1)
    result = one(worker, **forced, ignore_eos=True)
    assert (result.text(), result.finish(), result.end.completion_tokens) == ("", "length", 5)


def test_logprobs(worker: WorkerProcess) -> None:
    result = one(worker, prompt="x", temperature=0.0, max_tokens=12, logprobs=20)
    for entry in result.logprobs():
        assert len(entry.top) == 20
        assert entry.top[0].logprob == entry.logprob
        assert entry.top == sorted(entry.top, key=lambda top: -top.logprob)
        assert 0 < sum(math.exp(top.logprob) for top in entry.top) <= 1 + 1e-5
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    assert one(worker, prompt="x", max_tokens=3).logprobs() == []


def test_answer_ends_with_the_context(worker: WorkerProcess) -> None:
    result = one(worker, prompt="x", ignore_eos=True)
    assert result.finish() == "length"
    assert result.end.prompt_tokens + result.end.completion_tokens == CONTEXT


@pytest.mark.parametrize("max_tokens", [None, 100, 1])
def test_context_overflow_has_both_numbers(worker: WorkerProcess, max_tokens: int | None) -> None:
    length = CONTEXT - 56 if max_tokens == 100 else CONTEXT
    failed = one(worker, prompt=[5] * length, max_tokens=max_tokens).end
    assert isinstance(failed, Failed)
    assert failed.fault.code == "context_length_exceeded"
    assert failed.fault.numbers == {"n_prompt_tokens": length, "n_ctx": CONTEXT}
    assert f"maximum context length is {CONTEXT}" in failed.fault.message


def test_echo(worker: WorkerProcess, tokenizer: ChatTokenizer) -> None:
    result = one(worker, prompt="größe ", echo=True, max_tokens=3, seed=1, n=2)
    plain = one(worker, prompt="größe ", max_tokens=3, seed=1, n=2)
    assert [result.text(index) for index in (0, 1)] == ["größe " + plain.text(index) for index in (0, 1)]
    ids = tokenizer.encode("größe ", add_special_tokens=True)
    assert one(worker, prompt=ids, echo=True, max_tokens=3, seed=1).text() == result.text()


def test_structured_output(worker: WorkerProcess) -> None:
    for seed in range(6):
        schema = ResponseFormat(kind="json_schema", schema=PERSON)
        result = one(worker, response_format=schema, seed=seed, n=2)
        for choice in (0, 1):
            assert result.finish(choice) == "stop"
            jsonschema.validate(json.loads(result.text(choice)), PERSON)
    pattern = ResponseFormat(kind="regex", regex="[a-f]{3,5}-[0-9]{2}")
    assert re.fullmatch("[a-f]{3,5}-[0-9]{2}", one(worker, prompt="x", response_format=pattern).text())
    choice = ResponseFormat(kind="choice", choices=["yes", "no"])
    assert one(worker, response_format=choice, ignore_eos=True).text() in ("yes", "no")
    thinking = one(worker, response_format=choice, template_kwargs={"enable_thinking": True})
    assert thinking.text() in ("yes", "no")


@pytest.mark.parametrize(("forced", "name"), [(TOOLS, None), (TOOLS[:1], "greet")])
def test_forced_tool_calls(worker: WorkerProcess, forced: list[Any], name: str | None) -> None:
    for seed in range(4):
        result = one(worker, tools=TOOLS, forced_tools=forced, parallel_tool_calls=False, seed=seed)
        assert (result.text(), result.finish()) == ("", "tool_calls")
        ((called, arguments),) = result.calls()
        assert called in ("greet", "now")
        assert name in (None, called)
        if called == "greet":
            jsonschema.validate(json.loads(arguments), PERSON)


def test_tools_are_in_the_prompt(worker: WorkerProcess) -> None:
    plain = one(worker, seed=1, max_tokens=8)
    with_tools = one(worker, seed=1, max_tokens=8, tools=TOOLS)
    assert with_tools.end.prompt_tokens > plain.end.prompt_tokens


def test_strict_tool(worker: WorkerProcess, tokenizer: ChatTokenizer) -> None:
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    eager = {tokenizer.id_of("<tool_call>"): 100.0}  # forces a call wherever the grammar permits one
    for seed in range(4):
        result = one(worker, tools=strict, parallel_tool_calls=False, logit_bias=eager, seed=seed)
        assert (result.text(), result.finish()) == ("", "tool_calls")
        ((called, arguments),) = result.calls()
        assert called in ("greet", "now")
        if called == "greet":
            jsonschema.validate(json.loads(arguments), PERSON)
    assert one(worker, tools=strict, max_tokens=8, seed=1).end.completion_tokens == 8


def test_tools_are_refused_for_an_unknown_call_format(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "other", template="{{ messages[0].content }}{% if tools %}{% endif %}")
    table = json.loads((folder / "tokenizer.json").read_text())
    table["added_tokens"] = [entry for entry in table["added_tokens"] if entry["special"]]
    (folder / "tokenizer.json").write_text(json.dumps(table))
    worker = WorkerProcess()
    worker.load(folder, cache_bytes=2**20)
    result = one(worker, tools=TOOLS)
    assert (result.end.fault.code, result.end.fault.param) == ("unsupported_parameter", "tools")
    assert one(worker, max_tokens=4).end.completion_tokens == 4
    worker.send(frames.Shutdown())
    assert worker.close()[0] == 0


def test_continue_final_message(worker: WorkerProcess, tokenizer: ChatTokenizer) -> None:
    messages = [*HI, {"role": "assistant", "content": "one two"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none two"
    ids = tokenizer.encode(text, add_special_tokens=False)
    continued = one(worker, messages=messages, continue_final_message=True, seed=1, max_tokens=8)
    assert continued.end.prompt_tokens == len(ids)
    assert continued.text() == one(worker, prompt=ids, seed=1, max_tokens=8).text()


def test_reasoning_opened_by_the_template(worker: WorkerProcess) -> None:
    result = one(worker, template_kwargs={"enable_thinking": True}, max_tokens=8, seed=1)
    assert result.text() == ""
    assert "".join(piece.reasoning for piece in result.pieces())


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "top_p": ({"top_p": 0.0}, "invalid_request", "top_p"),
    "logprobs": ({"logprobs": 21}, "invalid_request", "logprobs"),
    "logit_bias": ({"logit_bias": {VOCAB: 1.0}}, "invalid_request", "logit_bias"),
    "max_tokens": ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    "empty prompt": ({"prompt": ""}, "invalid_request", "prompt"),
    "token beyond the vocabulary": ({"prompt": [VOCAB]}, "invalid_request", "prompt"),
    "negative token": ({"prompt": [-1]}, "invalid_request", "prompt"),
    "template variable": (
        {"template_kwargs": {"messages": []}},
        "unsupported_parameter",
        "chat_template_kwargs.messages",
    ),
    "tools and a format": (
        {"tools": TOOLS, "response_format": ResponseFormat(kind="json_object")},
        "unsupported_parameter",
        "response_format",
    ),
    "schema": (
        {"response_format": ResponseFormat(kind="json_schema", schema={"not": {}})},
        "invalid_request",
        "response_format.json_schema.schema",
    ),
    "continuing a user": ({"continue_final_message": True}, "invalid_request", "continue_final_message"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_parameter(worker: WorkerProcess, name: str) -> None:
    fields, code, param = REFUSED[name]
    result = one(worker, **fields)
    assert len(result.frames) == 1
    assert isinstance(result.end, Failed)
    assert (result.end.fault.code, result.end.fault.param) == (code, param)


def test_cancel_during_an_answer(worker: WorkerProcess) -> None:
    fields = ask(prompt="x", ignore_eos=True, n=2)
    worker.send(fields)
    assert isinstance(worker.read(), Started)
    worker.read()
    worker.send(frames.Cancel(id=fields.id))
    (result,) = worker.collect([fields.id])
    assert isinstance(result.end, Finished)
    assert result.end.cancelled
    assert 0 < result.end.completion_tokens < 2 * CONTEXT
    for _ in range(3):  # the engine frees a request within two steps
        one(worker, prompt="y", max_tokens=1)
    stats = worker.ask(frames.AskStats(id="s"))
    assert (stats.running, stats.waiting, stats.cache_used) == (0, 0, 0)


def test_shutdown_during_an_answer(folder: Path) -> None:
    worker = WorkerProcess()
    worker.load(folder)
    fields = ask(prompt="x", ignore_eos=True, n=2)
    worker.send(fields)
    worker.read()
    worker.send(frames.Shutdown())
    (result,) = worker.collect([fields.id])
    assert isinstance(result.end, Finished)
    assert result.end.cancelled  # the answer was cut
    assert worker.close()[0] == 0


def test_cancel_before_the_answer(worker: WorkerProcess) -> None:
    fields = ask()
    worker.send(fields, frames.Cancel(id=fields.id))
    (result,) = worker.collect([fields.id])
    assert isinstance(result.end, Finished)
    assert result.end.cancelled
    worker.send(frames.Cancel(id="never heard of"))
    assert one(worker, max_tokens=1).finish() == "length"


def test_random_requests_and_cancels(worker: WorkerProcess) -> None:
    chance = random.Random(7)
    names, over = [], set()
    for index in range(80):
        fields = ask(
            prompt=[chance.randrange(3, 300) for _ in range(chance.randrange(1, 60))],
            n=chance.randrange(1, 4),
            max_tokens=chance.randrange(1, 40),
            stop=["e"] if chance.random() < 0.3 else [],
            response_format=ResponseFormat(kind="regex", regex="[a-z]{1,30}") if chance.random() < 0.3 else None,
            ignore_eos=chance.random() < 0.5,
        )
        names.append(fields.id)
        worker.send(fields)
        if chance.random() < 0.4:
            worker.send(frames.Cancel(id=chance.choice(names)))
        while index % 5 == 4 and len(over) < len(names) - 8:  # at most twelve at a time
            frame = worker.read()
            assert frame.id not in over
            if isinstance(frame, (Finished, Failed)):
                assert isinstance(frame, Finished)
                over.add(frame.id)
    for result in worker.collect([name for name in names if name not in over]):
        assert isinstance(result.end, Finished)
    one(worker, prompt="x", max_tokens=3)
    stats = worker.ask(frames.AskStats(id="s"))
    assert (stats.running, stats.waiting, stats.cache_used) == (0, 0, 0)


def test_child_processes_end_with_a_killed_worker(folder: Path) -> None:
    worker = WorkerProcess()
    worker.load(folder)
    one(worker, response_format=ResponseFormat(kind="choice", choices=["a"]))
    helpers = psutil.Process(worker.process.pid).children()
    assert len(helpers) == 2
    worker.process.kill()
    worker.process.wait()
    _, alive = psutil.wait_procs(helpers, timeout=100)
    assert alive == []
    worker.close()


def test_tokenize_and_detokenize(worker: WorkerProcess, tokenizer: ChatTokenizer) -> None:
    tokens = worker.ask(frames.Tokenize(id="t", prompt="größe 🙂<|im_end|>"))
    assert tokens.tokens == tokenizer.encode("größe 🙂<|im_end|>", add_special_tokens=True)
    assert len(tokens.pieces) == len(tokens.tokens)
    assert worker.ask(frames.Detokenize(id="t", tokens=tokens.tokens)).text == "größe 🙂<|im_end|>"
    chat = worker.ask(frames.Tokenize(id="t", messages=HI))
    assert len(chat.tokens) == one(worker, max_tokens=1).end.prompt_tokens
    failed = worker.ask(frames.Detokenize(id="t", tokens=[VOCAB]))
    assert (failed.fault.code, failed.fault.param) == ("invalid_request", "tokens")


def test_stats(worker: WorkerProcess) -> None:
    before = worker.ask(frames.AskStats(id="s"))
    one(worker, prompt="count me", max_tokens=5, ignore_eos=True)
    after = worker.ask(frames.AskStats(id="s"))
    assert after.tokens_out - before.tokens_out == 5
    assert after.steps > before.steps
    assert after.cache_tokens > 0


def test_prompts_are_not_logged(folder: Path) -> None:
    worker = WorkerProcess()
    worker.load(folder)
    one(worker, prompt="a secret word", max_tokens=2)
    one(worker, messages=[{"role": "user", "content": "a secret word"}], tools=[{"function": 3}])
    worker.send(frames.Shutdown())
    code, log = worker.close()
    assert code == 0
    assert "secret" not in log


def test_unexpected_error_fails_only_one_request(folder: Path) -> None:
    worker = WorkerProcess()
    worker.load(folder)
    result = one(worker, tools=[{"function": ["not", "an", "object"]}])
    assert isinstance(result.end, Failed)
    assert result.end.fault.code in ("internal_error", "invalid_request")
    assert "Traceback" not in result.end.fault.message
    assert one(worker, max_tokens=2).finish() == "length"
    worker.close()


def break_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**12) + b"{}")


def break_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mystery"}))


BROKEN: dict[str, Any] = {
    "truncated weights": (break_weights, "model_unusable"),
    "absurd header": (break_header, "model_unusable"),
    "unknown architecture": (break_architecture, "model_unusable"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "model_unusable"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "model_unusable"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "model_unusable"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "model_unusable"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_unusable_models_are_refused(tmp_path: Path, name: str) -> None:
    harm, code = BROKEN[name]
    folder = write_model(tmp_path)
    harm(folder)
    worker = WorkerProcess()
    failed = worker.load(folder)
    assert isinstance(failed, frames.LoadFailed), failed
    assert failed.fault.code == code
    assert failed.fault.message
    assert worker.close()[0] == 1


def test_unknown_backend_and_missing_folder(folder: Path, tmp_path: Path) -> None:
    worker = WorkerProcess()
    assert worker.load(folder, backend="abacus").fault.code == "backend_unavailable"
    assert worker.close()[0] == 1
    worker = WorkerProcess()
    assert worker.load(tmp_path / "nothing").fault.code == "model_unusable"
    assert worker.close()[0] == 1


def test_worker_ends_with_the_daemon(folder: Path) -> None:
    loading, idle, busy = WorkerProcess(), WorkerProcess(), WorkerProcess()
    loading.send(frames.Load(model="tiny", path=str(folder), backend="cpu"))
    assert isinstance(loading.read(), frames.Loading)
    busy.load(folder)
    busy.send(ask(prompt="x", ignore_eos=True, n=8))
    busy.read()
    assert [worker.close()[0] for worker in (loading, idle, busy)] == [0, 0, 0]


@pytest.mark.parametrize(
    "sent",
    [
        frames.pack(frames.AskStats(id="s")),
        b"\x00\x00\x00\x03abc",
        b"\xff\xff\xff\xff",
        frames.pack(frames.Finished(id="x")),
    ],
)
def test_broken_protocol_ends_the_worker(sent: bytes) -> None:
    worker = WorkerProcess()
    worker.socket.sendall(sent)
    with pytest.raises(EOFError):
        worker.read()
    assert worker.close()[0] == 2


@pytest.mark.skipif(not (paths.guide_dir() / "model.safetensors").exists(), reason="the built-in model is not here")
def test_built_in_model() -> None:
    worker = WorkerProcess()
    assert isinstance(worker.load(paths.guide_dir()), frames.Loaded)
    question = [{"role": "user", "content": "How do I download a model?"}]
    answers = worker.generate(*(ask(messages=question, temperature=0.0, max_tokens=32) for _ in range(3)))
    assert len({answer.text() for answer in answers}) == 1
    assert answers[0].text().strip()
    schema = ResponseFormat(kind="json_schema", schema=PERSON)
    jsonschema.validate(json.loads(one(worker, messages=question, response_format=schema).text()), PERSON)
    forced = one(worker, messages=question, tools=TOOLS, forced_tools=TOOLS, parallel_tool_calls=False)
    assert (forced.finish(), len(forced.calls())) == ("tool_calls", 1)
    worker.send(frames.Shutdown())
    assert worker.close()[0] == 0


def test_crash_in_a_library_writes_the_calls_of_all_threads_to_the_log() -> None:
    code = """
import os, signal
from localllm.app.worker import worker
async def _serve(fd):
    os.kill(os.getpid(), signal.SIGBUS)
worker._serve = _serve
worker.main()
"""
    done = subprocess.run([sys.executable, "-c", code, "--fd", "0"], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert "in _serve" in done.stderr
