"""llama.cpp loads or refuses every file that our reader accepts, without a crash. Each file has its own process."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model

from ..engine.files.gguf_corruptions import VOCABULARIES, Case, content, corruptions, tensor_corruptions, tensors

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

pytestmark = pytest.mark.real

CHILD = (sys.executable, "-m", "tests.backends.llamacpp_child")
ROOT = Path(__file__).parents[2]


def crashes(folder: Path, files: Iterable[tuple[str, bytes]]) -> tuple[int, list[str]]:
    """Load each accepted file with llama.cpp. Returns the number of accepted files, and those that crash it."""
    accepted = {}
    for number, (title, data) in enumerate(files):
        file = folder / f"{number}.gguf"
        file.write_bytes(data)
        try:
            read_model(file)
        except ModelRefused:
            file.unlink()
        else:
            accepted[file] = title
    names = "".join(f"{file}\n" for file in accepted)
    child = subprocess.run(CHILD, input=names, capture_output=True, text=True, cwd=ROOT, check=True)
    results = zip(accepted.values(), child.stdout.splitlines(), strict=True)
    return len(accepted), [f"{title}: {result}" for title, result in results if result not in ("loaded", "refused")]


def made(cases: Iterable[Case]) -> Iterator[tuple[str, bytes]]:
    for case in cases:
        yield case.title, case.content()


def all_corruptions() -> Iterator[Case]:
    return chain(*map(corruptions, VOCABULARIES), tensor_corruptions())


def mutations(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Files with some random bytes of their header changed, removed, repeated or exchanged."""
    source = random.Random(seed)
    sound = {name: content(vocabulary(), tensors()) for name, vocabulary in VOCABULARIES.items()}
    names = list(sound)
    for number in range(count):
        name = source.choice(names)
        data = bytearray(sound[name])
        header = len(data) - sum(-(-tensor.num_bytes // 32) * 32 for tensor in tensors().values())
        for _ in range(source.choice((1, 1, 2, 4))):
            _mutate(data, header, source)
        yield f"mutation {number} of {name} with seed {seed}", bytes(data)


def _mutate(data: bytearray, header: int, source: random.Random) -> None:
    position = source.randrange(8, header)
    match source.randrange(4):
        case 0:
            data[position] ^= 1 << source.randrange(8)
        case 1:
            data[position] = source.choice((0, 1, 127, 128, 255))
        case 2:
            data[position : position + 4] = source.choice((0, 1, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little")
        case 3:
            other = source.randrange(8, header)
            data[position : position + 8] = data[other : other + 8]


def test_child_reports_a_crash(tmp_path: Path) -> None:
    """A file that our reader refuses, and that ends the process of llama.cpp."""
    metadata = VOCABULARIES["spm"]()
    tokens = metadata["tokenizer.ggml.tokens"].value
    assert isinstance(tokens, list)
    tokens[-1] = tokens[-2]
    file = tmp_path / "duplicate.gguf"
    file.write_bytes(content(metadata, tensors()))
    child = subprocess.run(CHILD, input=f"{file}\n", capture_output=True, text=True, cwd=ROOT, check=True)
    assert child.stdout == "died of SIGABRT\n"


def test_sound_models_are_loaded(tmp_path: Path) -> None:
    for name, vocabulary in VOCABULARIES.items():
        (tmp_path / f"{name}.gguf").write_bytes(content(vocabulary(), tensors()))
    files = sorted(tmp_path.iterdir())
    names = "".join(f"{file}\n" for file in files)
    child = subprocess.run(CHILD, input=names, capture_output=True, text=True, cwd=ROOT, check=True)
    assert child.stdout.splitlines() == ["loaded"] * len(files)


def test_accepted_corruptions_do_not_crash_llamacpp(tmp_path: Path) -> None:
    accepted, crashed = crashes(tmp_path, made(islice(all_corruptions(), 0, None, 24)))
    assert accepted > 150
    assert crashed == []


def test_accepted_mutations_do_not_crash_llamacpp(tmp_path: Path) -> None:
    accepted, crashed = crashes(tmp_path, mutations(200, 0))
    assert accepted > 20
    assert crashed == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_accepted_corruption_crashes_llamacpp(tmp_path: Path) -> None:
    accepted, crashed = crashes(tmp_path, made(all_corruptions()))
    assert accepted > 4000
    assert crashed == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 5))
def test_no_accepted_mutation_crashes_llamacpp(tmp_path: Path, seed: int) -> None:
    accepted, crashed = crashes(tmp_path, mutations(5000, seed))
    assert accepted > 500
    assert crashed == []


UNCAUGHT = """
import sys
from localllm.backends.llamacpp.library import library
c = library().c
parameters = c.llama_model_default_params()
parameters.vocab_only = True
model = c.llama_model_load_from_file(sys.argv[1].encode(), parameters)
c.llama_tokenize(c.llama_model_get_vocab(model), b"\\n", 1, (c.llama_token * 9)(), 9, False, False)
"""


def test_uncaught_exception_starts_no_debugger(tmp_path: Path) -> None:
    """A debugger would stop the worker for seconds, and run the scripts of the user."""
    metadata = VOCABULARIES["spm"]()
    tokens = metadata["tokenizer.ggml.tokens"].value
    assert isinstance(tokens, list)
    tokens[tokens.index(b"<0x0A>")] = b"other"
    file = tmp_path / "no-newline.gguf"
    file.write_bytes(content(metadata, tensors()))
    child = subprocess.run((sys.executable, "-c", UNCAUGHT, file), capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == -signal.SIGABRT
    assert "std::out_of_range" in child.stderr
    assert "ggml_print_backtrace" not in child.stdout + child.stderr
