"""The tokenizer of GGUF files, compared with the library `tokenizers` and with llama.cpp's own functions."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm.app.chat.answer import Choice, ReadingOptions
from localllm.app.chat.calls.records import FORMATS, REASONING
from localllm.app.chat.output.parser import AnswerFormat
from localllm.app.chat.prompt import Prompt
from localllm.app.chat.tokenizer import gguf as module
from localllm.app.chat.tokenizer.gguf import GgufTokenizer
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.chat.tokenizer.special_tokens import PROTECT, RELEASE
from localllm.app.errors import InvalidRequest, OutOfMemory, UnsupportedParameter
from localllm.app.frames import ResponseFormat
from localllm.app.grammar.compiler import GrammarCompiler
from localllm.app.paths import guide_dir
from localllm.backends.llamacpp import vocabulary as vocabulary_module
from localllm.backends.llamacpp.library import library
from localllm.engine.errors import ModelRefused
from localllm.engine.request import Delta

from ..test_text_stream import samples, stream_text
from .gguf_vocabularies import CONTROL, KINDS_OF_GGUF, NORMAL, UNKNOWN, Pair, open_tokenizer, pair, vocabulary_keys
from .vocabularies import BYTES, hostile_text, make_text

SAMPLE = 200  # texts for each kind of vocabulary in every run
FULL_SAMPLE = 4000  # in runs with --slow
# llama.cpp's BERT vocabulary removes accents and unusual characters, unlike the tokenizer that the tests train.
EXACT = sorted(KINDS_OF_GGUF.keys() - {"bert", "plamo2"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(params=KINDS_OF_GGUF)
def vocabulary(request: pytest.FixtureRequest, folder: Path) -> Pair:
    return pair(request.param, folder)


def added_texts(tokenizer: GgufTokenizer) -> list[str]:
    return sorted(tokenizer.token_bytes(token).decode() for token in tokenizer.added_ids)


def text_with_tokens(tokenizer: GgufTokenizer, seed: int) -> str:
    """A random text; every second one has special and other added tokens."""
    chance = random.Random(seed)
    segments = [make_text(chance)]
    for _ in range(chance.choice([0, 1, 3]) if seed % 2 else 0):
        segments += [chance.choice(added_texts(tokenizer)), chance.choice(["", " ", "\n"]), make_text(chance)]
    return "".join(segments)


def is_comparable(kind: str, tokenizer: GgufTokenizer, text: str) -> bool:
    """Whether llama.cpp and `tokenizers` agree on such a text.

    T5 vocabularies: llama.cpp writes no space before a text without letters. Phi 3: white space is that of ASCII.
    """
    if kind == "phi-3":
        return not set(text) & set("\u00a0\u200b\u3000")
    if kind != "t5":
        return True
    for token in added_texts(tokenizer):
        text = text.replace(token, "\ue000")
    return all(segment.strip(" ") for segment in text.split("\ue000") if segment)


def compare_ids(kind: str, folder: Path, sample: int) -> None:
    vocabulary = pair(kind, folder)
    for seed in range(sample):
        text = text_with_tokens(vocabulary.tokenizer, seed)
        if is_comparable(kind, vocabulary.tokenizer, text):
            assert vocabulary.tokenizer.encode(text, add_special_tokens=False) == vocabulary.reference(text), text


@pytest.mark.parametrize("kind", EXACT)
def test_ids_equal_those_of_tokenizers(kind: str, folder: Path) -> None:
    compare_ids(kind, folder, SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", EXACT)
def test_ids_equal_those_of_tokenizers_for_many_texts(kind: str, folder: Path) -> None:
    compare_ids(kind, folder, FULL_SAMPLE)


def test_tokens_around_a_prompt_are_those_of_llama_cpp(vocabulary: Pair) -> None:
    tokenizer = vocabulary.tokenizer
    for text in ("", "a fox", added_texts(tokenizer)[0] + "x"):
        data = text.encode()
        ids = (ctypes.c_int32 * 64)()
        count = library().c.llama_tokenize(tokenizer._vocabulary._vocab, data, len(data), ids, 64, True, True)
        assert tokenizer.encode(text, add_special_tokens=True) == ids[:count]


def test_marks_around_no_token_change_nothing(vocabulary: Pair) -> None:
    tokenizer = vocabulary.tokenizer
    for seed in range(SAMPLE):
        text = text_with_tokens(tokenizer, seed)
        expected = tokenizer.encode(text, add_special_tokens=True)
        assert tokenizer.encode(PROTECT + RELEASE + text, add_special_tokens=True) == expected, text


def test_protected_text_has_no_special_token(vocabulary: Pair) -> None:
    tokenizer = vocabulary.tokenizer
    controls = tokenizer.control_ids - {tokenizer.id_of("<unk>")}
    for seed in range(SAMPLE):
        text = text_with_tokens(tokenizer, seed)
        ids = tokenizer.encode(tokenizer.protect(text), add_special_tokens=False)
        assert controls.isdisjoint(ids), text
    control = min(controls)
    rendered = tokenizer.token_bytes(control).decode() + tokenizer.protect("".join(added_texts(tokenizer)))
    assert controls.intersection(tokenizer.encode(rendered, add_special_tokens=False)) == {control}


def test_protected_text_has_the_ids_of_the_same_model_in_safetensors(folder: Path) -> None:
    gguf = pair("qwen2", folder).tokenizer
    safetensors = ChatTokenizer(guide_dir())
    for seed in range(SAMPLE):
        text = unicodedata.normalize("NFC", text_with_tokens(gguf, seed))  # llama.cpp has no normalisation
        marked = gguf.protect(text)
        assert marked == safetensors.protect(text)
        rendered = f"<|im_start|>user\n{marked}<|im_end|>\n"
        expected = safetensors.encode(rendered, add_special_tokens=False)
        assert gguf.encode(rendered, add_special_tokens=False) == expected, text


def test_special_tokens_equal_those_of_the_same_model_in_safetensors(folder: Path) -> None:
    gguf = pair("qwen2", folder).tokenizer
    safetensors = ChatTokenizer(guide_dir(), [0])
    assert gguf.special_ids == safetensors.special_ids
    assert gguf.control_tokens == safetensors.control_tokens
    assert gguf.control_ids == safetensors.control_ids
    assert gguf.added_ids == safetensors.added_ids
    assert gguf.eos_ids == safetensors.eos_ids
    assert gguf.vocab_size == safetensors.vocab_size
    assert gguf.special_tokens == safetensors.special_tokens
    for token in ("<|im_end|>", "<tool_call>", "a", "<no token>", ""):
        assert gguf.id_of(token) == safetensors.id_of(token)
    for token in range(-1, gguf.vocab_size + 2):
        assert gguf.token_bytes(token) == safetensors.token_bytes(max(token, 2**31 * (token < 0)))


def test_the_text_of_a_stream_equals_one_decode_of_all_tokens(vocabulary: Pair) -> None:
    tokenizer: Any = vocabulary.tokenizer
    for tokens, chance in samples(tokenizer, SAMPLE):
        text = tokenizer.decode(tokens, hidden=tokenizer.special_ids)
        assert stream_text(tokenizer, tokens, chance) == (text, len(tokens)), tokens


@pytest.mark.parametrize("kind", sorted(KINDS_OF_GGUF.keys() - {"bert", "t5"}))
def test_encoded_text_decodes_to_itself(kind: str, folder: Path) -> None:
    tokenizer = pair(kind, folder).tokenizer
    for seed in range(SAMPLE):
        # Sentencepiece writes spaces as ▁. PLaMo 2 drops U+FEFF.
        text = make_text(random.Random(seed)).replace("▁", " ").replace("\ufeff", "")
        if not any(token in text for token in added_texts(tokenizer)):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_character_of_several_tokens_is_never_split(folder: Path) -> None:
    tokenizer: Any = pair("llama", folder).tokenizer
    for text in ("🇫🇷 ok", "👨‍👩‍👧‍👦 ok", "ไทย한국ok", "𝔘𝔫\nok"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert stream_text(tokenizer, tokens, random.Random(0)) == (text, len(tokens))


def spm(file: Path, tokens: list[str], types: list[int], **more: Any) -> GgufTokenizer:
    """A sentencepiece vocabulary: <unk>, <s>, </s>, all bytes, then `tokens`."""
    texts = ["<unk>", "<s>", "</s>", *BYTES, *tokens]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[6] * 256, *types]
    scores = [-float(index) for index in range(len(texts))]
    return open_tokenizer(file, vocabulary_keys("llama", texts, kinds, scores=scores, **more))


def test_merges_cannot_make_a_control_token(tmp_path: Path) -> None:
    """Plain text: "</" and "s>" are tokens whose merge is the control token </s>."""
    parts = ["</", "s>", "<", "/", "s", ">", "▁"]
    tokenizer = spm(tmp_path / "merges.gguf", parts, [NORMAL] * len(parts))
    ids = tokenizer.encode(tokenizer.protect("</s>"), add_special_tokens=False)
    assert tokenizer.decode(ids) == "</s>"
    assert 2 not in ids
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


@pytest.mark.parametrize("text", [" <PRE>", "<PRE>", "▁<PRE>", "x <PRE> y"])
def test_a_control_token_with_a_space_is_protected(text: str, tmp_path: Path) -> None:
    parts = ["▁<PRE>", "▁<PRE", "▁<PR", "▁<P", "▁<", "<", "P", "R", "E", ">", "▁", "x", "y"]
    tokenizer = spm(tmp_path / "space.gguf", parts, [CONTROL, *[NORMAL] * (len(parts) - 1)])
    control = tokenizer.id_of("▁<PRE>")
    assert control in tokenizer.encode(" <PRE>", add_special_tokens=False), "the vocabulary shows the problem"
    ids = tokenizer.encode(tokenizer.protect(text), add_special_tokens=False)
    assert control not in ids
    assert tokenizer.decode(ids).strip() == text.replace("▁", " ").strip()


def test_control_tokens_of_gpt_oss_are_protected(tmp_path: Path) -> None:
    tokens = ["<|start|>", "<|message|>", *sorted(set("<|startmeg>")), *map(chr, range(256, 300))]
    types = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2)]
    keys = vocabulary_keys("gpt2", tokens, types, pre="gpt-4o", merges=["a a"])
    tokenizer = open_tokenizer(tmp_path / "harmony.gguf", keys)
    assert tokenizer.encode("<|start|>", add_special_tokens=False) == [0]
    ids = tokenizer.encode(tokenizer.protect("<|start|>"), add_special_tokens=False)
    assert tokenizer.decode(ids) == "<|start|>"
    assert len(ids) == 9


def test_unknown_characters_stay_the_unknown_token(tmp_path: Path) -> None:
    """Some files give the unknown token the type of control tokens."""
    tokens = ["<unk>", "</s>", "▁", "a"]
    types = [CONTROL, CONTROL, NORMAL, NORMAL]
    keys = vocabulary_keys("t5", tokens, types, scores=[0.0, 0.0, -1.0, -1.0], unknown_token_id=0, eos_token_id=1)
    tokenizer = open_tokenizer(tmp_path / "unknown.gguf", keys)
    expected = [*tokenizer.encode("aé", add_special_tokens=False)]
    assert 0 in expected
    assert tokenizer.encode(f"{PROTECT}{RELEASE}aé", add_special_tokens=False) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi-3", "plamo2", "qwen2"])
def test_user_defined_markers_are_control_tokens(kind: str, folder: Path) -> None:
    """llama.cpp makes their ids from any text. Here they stay in the text of an earlier answer only."""
    tokenizer = pair(kind, folder).tokenizer
    call = tokenizer.id_of("<tool_call>")
    assert call is not None
    assert call in tokenizer.control_ids - tokenizer.special_ids
    assert tokenizer.control_tokens["<tool_call>"] == call
    text = "a<tool_call> b</s>"
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode(tokenizer.protect(text), add_special_tokens=False))
    ids = tokenizer.encode(tokenizer.protect(text, own=True), add_special_tokens=False)
    assert [token for token in ids if token in tokenizer.control_ids] == [call]


def test_user_defined_text_is_a_token_in_any_text(tmp_path: Path) -> None:
    """llama.cpp does the same. Gemma has such tokens for spaces and for HTML tags."""
    texts = ["▁▁▁▁", "<b>", "naïve", "<x>", "a", "▁", "▁a"]
    tokenizer = spm(tmp_path / "texts.gguf", texts, [4, 4, 4, 4, *[NORMAL] * 3])
    ids = tokenizer.encode(tokenizer.protect("a▁▁▁▁<b>naïve<x>"), add_special_tokens=False)
    assert {259, 260, 261} <= set(ids)
    assert tokenizer.id_of("<x>") in tokenizer.control_ids - set(ids)


@pytest.mark.parametrize("kind", KINDS_OF_GGUF)
def test_hostile_text_has_no_control_token(kind: str, folder: Path) -> None:
    tokenizer = pair(kind, folder).tokenizer
    never = tokenizer.control_ids - {tokenizer.id_of("<unk>")}
    for seed in range(SAMPLE):
        text = hostile_text(random.Random(seed), sorted(tokenizer.control_tokens)).replace("\ufeff", "")
        ids = tokenizer.encode(tokenizer.protect(text), add_special_tokens=False)
        assert never.isdisjoint(ids), text
        if kind not in ("bert", "t5"):  # these lose white space and unknown characters
            assert tokenizer.decode(ids).replace("▁", " ") == _plain(text), text


def _plain(text: str) -> str:
    """A text as sentencepiece writes it, without the marks of protection."""
    return text.replace(PROTECT, "").replace(RELEASE, "").replace("▁", " ")


def test_a_byte_level_vocabulary_without_metadata_has_no_end(tmp_path: Path) -> None:
    """The default of llama.cpp is token 11, which is a comma in most vocabularies."""
    tokens = [*map(chr, range(33, 127))]
    keys = vocabulary_keys("gpt2", tokens, [NORMAL] * len(tokens), pre="gpt-2", merges=["a a"])
    tokenizer = open_tokenizer(tmp_path / "plain.gguf", {**keys, "tokenizer.ggml.eos_token_id": 10**6})
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.special_tokens == {}


def test_a_letter_that_is_no_byte_is_its_text(tmp_path: Path) -> None:
    tokens = ["a", "日本"]
    keys = vocabulary_keys("gpt2", tokens, [NORMAL] * 2, pre="gpt-2", merges=["a a"])
    assert open_tokenizer(tmp_path / "letters.gguf", keys).token_bytes(1) == "日本".encode()


def test_templates_have_names(tmp_path: Path) -> None:
    keys = {
        **vocabulary_keys("gpt2", ["a", "b"], [NORMAL] * 2, pre="gpt-2", merges=["a b"]),
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert open_tokenizer(tmp_path / "t.gguf", keys).templates == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize("kind", ["llama", "plamo2"])
def test_reasoning_and_tool_calls_are_recognised(kind: str, folder: Path) -> None:
    tokenizer = pair(kind, folder).tokenizer
    prompt = Prompt(ids=(1,), form=AnswerFormat(REASONING[0], FORMATS))
    options = ReadingOptions(tools=[{"type": "function", "function": {"name": "f"}}])
    choice = Choice("r", 0, tokenizer, prompt, options, stop_ids=tokenizer.eos_ids)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tokens = tokenizer.encode(f"<think>why é</think>text {call}", add_special_tokens=False)
    pieces = [choice.take(Delta("r", (token,))) for token in tokens]
    pieces.append(choice.take(Delta("r", (2,), finish="stop")))
    output = [piece for piece in pieces if piece is not None]
    assert "".join(piece.reasoning for piece in output) == "why é"
    assert "".join(piece.text for piece in output).strip() == "text"
    assert [call.name for piece in output for call in piece.tool_calls if call.name] == ["f"]
    assert output[-1].finish == "tool_calls"


@pytest.mark.parametrize("kind", ["llama", "rwkv"])
def test_a_vocabulary_without_a_byte_is_refused(kind: str, tmp_path: Path) -> None:
    bytes_of = {"llama": BYTES, "rwkv": [f"\\x{byte:02x}" for byte in range(256)]}
    tokens = ["<s>", *(text for text in bytes_of[kind] if text not in ("<0xC3>", "\\xc3"))]
    types = [CONTROL, *[6 if kind == "llama" else NORMAL] * 255]
    with pytest.raises(ModelRefused, match="its vocabulary has no token for the byte 0xc3"):
        open_tokenizer(tmp_path / "bytes.gguf", vocabulary_keys(kind, tokens, types, add_bos_token=False))


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="has no tokenizer"):
        open_tokenizer(tmp_path / "none.gguf", {"tokenizer.ggml.model": "none"})


def test_a_text_without_a_token_for_its_characters_is_refused(tmp_path: Path) -> None:
    keys = vocabulary_keys("bert", ["▁a", "b"], [NORMAL] * 2)
    keys |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_sep_token": False}
    tokenizer = open_tokenizer(tmp_path / "unknown.gguf", keys)
    with pytest.raises(InvalidRequest, match="a character that the vocabulary of this model cannot represent"):
        tokenizer.encode("é", add_special_tokens=False)


def test_a_very_long_text_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT", 10)
    tokenizer = pair("qwen2", folder).tokenizer
    assert tokenizer.encode("a" * 10, add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="the text has 11 characters; the limit of GGUF models is 10"):
        tokenizer.encode("a" * 11, add_special_tokens=False)


def test_a_text_without_memory_for_its_stack_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = pair("qwen2", folder).tokenizer

    def no_memory(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    size = threading.stack_size()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_memory)
        with pytest.raises(OutOfMemory, match="no memory to tokenize a text of 600 characters"):
            tokenizer.encode("a" * 600, add_special_tokens=False)
    assert threading.stack_size() == size
    assert tokenizer.encode("a" * 600, add_special_tokens=False)


LONG = """
import sys
from pathlib import Path
from tests.app.chat.tokenizer.gguf_vocabularies import byte_level
tokenizer = byte_level("tekken", Path(sys.argv[1])).tokenizer
for letter in "a ":
    assert tokenizer.decode(tokenizer.encode(letter * 150_000, add_special_tokens=False)) == letter * 150_000
"""


def test_a_long_word_does_not_overflow_the_stack(tmp_path: Path) -> None:
    """Runs in another process, because an overflow would end the process."""
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", LONG, str(tmp_path / "long.gguf")], cwd=root, check=False, timeout=100)
    assert done.returncode == 0


def test_the_longest_added_token_has_priority(tmp_path: Path) -> None:
    parts = ["<x>", "<x>y", "<", "x", ">", "y", "▁"]
    tokenizer = spm(tmp_path / "longest.gguf", parts, [CONTROL, CONTROL, *[NORMAL] * 5])
    expected = [tokenizer.id_of("<x>y"), tokenizer.id_of("<x>")]
    for text in ("<x>y<x>", f"{PROTECT}{RELEASE}<x>y<x>"):
        assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_texts_may_have_more_tokens_than_bytes(tmp_path: Path) -> None:
    """Without a token for ▁, each space is three bytes."""
    tokenizer = spm(tmp_path / "spaces.gguf", ["a"], [NORMAL], add_space_prefix=False)
    ids = tokenizer.encode("     ", add_special_tokens=False)
    assert len(ids) == 15


def test_tokens_may_be_long(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path / "token.gguf", ["é" * 300], [NORMAL])
    assert tokenizer.token_bytes(259) == ("é" * 300).encode()


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi-3"])
def test_long_texts_have_the_ids_of_short_ones(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentencepiece: long texts are tokenized in chunks. Here each character without a token begins a chunk."""
    tokenizer = pair(kind, folder).tokenizer
    texts = [text_with_tokens(tokenizer, seed) for seed in range(SAMPLE)]
    expected = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    monkeypatch.setattr(vocabulary_module, "_SHORT_TEXT", 0)
    monkeypatch.setattr(vocabulary_module, "_CHUNK", 1)
    assert max(len(tokenizer._vocabulary._chunks(text)) for text in texts) > 10
    assert [tokenizer.encode(text, add_special_tokens=True) for text in texts] == expected


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["é", "<|im_end|>", 4]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def test_grammars_allow_the_tokens_of_the_same_model_in_safetensors(folder: Path) -> None:
    compilers = [
        GrammarCompiler(tokenizer, 6150)
        for tokenizer in (pair("qwen2", folder).tokenizer, ChatTokenizer(guide_dir(), [0]))
    ]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    json_format = ResponseFormat(kind="json_schema", schema=SCHEMA)
    for compile_with in (
        lambda compiler: compiler.compile(json_format),
        lambda compiler: compiler.compile_forced_calls(FORMATS[0], [tool], parallel=True),
    ):
        for seed in range(8):
            chance = random.Random(seed)
            grammars = [compile_with(compiler) for compiler in compilers]
            for _ in range(40):
                masks = [grammar.allowed() for grammar in grammars]
                np.testing.assert_array_equal(*masks)
                allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
                token = int(chance.choice(allowed))
                for grammar in grammars:
                    grammar.accept(token)
                if grammars[0].finished:
                    break
    for compiler in compilers:
        compiler.close()


def prescribed(tokenizer: GgufTokenizer, text: str) -> list[int]:
    """The tokens of the only text that a grammar allows, without the end."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = compiler.compile(ResponseFormat(kind="choice", choices=[text]))
    tokens: list[int] = []
    while not grammar.finished:
        bits = np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little")
        tokens.append(int(np.flatnonzero(bits)[0]))
        grammar.accept(tokens[-1])
    compiler.close()
    return [token for token in tokens if token not in tokenizer.eos_ids]


def test_prescribed_text_has_the_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    """The tokenizer merges b and c first; the longest token at the start is ab. The text has no space before it."""
    tokenizer = spm(tmp_path / "first.gguf", ["bc", "▁a", "ab", "a", "b", "c", "▁"], [NORMAL] * 7, eos_token_id=2)
    assert [tokenizer.token_bytes(token) for token in prescribed(tokenizer, "abc")] == [b"a", b"bc"]


@pytest.mark.parametrize("kind", sorted(KINDS_OF_GGUF.keys() - {"bert", "t5"}))
def test_prescribed_text_has_no_control_token(kind: str, folder: Path) -> None:
    tokenizer = pair(kind, folder).tokenizer
    for text in sorted(tokenizer.control_tokens):
        text = f"a{text} b"
        tokens = prescribed(tokenizer, text)
        assert tokenizer.control_ids.isdisjoint(tokens)
        assert tokenizer.decode(tokens, hidden=tokenizer.control_ids) == text


def test_a_grammar_needs_tokens_of_all_bytes(folder: Path) -> None:
    """The vocabulary of T5 has no bytes."""
    with pytest.raises(UnsupportedParameter, match="no token for some byte"):
        prescribed(pair("t5", folder).tokenizer, "x")


@pytest.mark.parametrize("kind", ["llama", "gemma", "rwkv"])
def test_grammars_work_with_every_kind_of_vocabulary(kind: str, folder: Path) -> None:
    tokenizer = pair(kind, folder).tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    for seed in range(5):
        chance = random.Random(seed)
        grammar = compiler.compile(ResponseFormat(kind="choice", choices=["für x", "{'naïve': 日本}"]))
        tokens: list[int] = []
        while not grammar.finished:
            bits = np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little")
            tokens.append(int(chance.choice(np.flatnonzero(bits))))
            grammar.accept(tokens[-1])
        data = b"".join(tokenizer.token_bytes(token) for token in tokens if token not in tokenizer.eos_ids)
        assert data.decode() in ("für x", "{'naïve': 日本}")
    compiler.close()
