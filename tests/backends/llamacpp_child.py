"""Loads GGUF files with llama.cpp, each in a process of its own: `python -m tests.backends.llamacpp_child FILE...`.

Prints one line for each file: `loaded`, `refused`, or the reason why the process ended. This module imports nothing of
localllm, so that the result is that of llama.cpp alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

from llama_cpp import llama_cpp

MEMORY = 2 * 2**30  # bytes of address space that a load may add
SECONDS = 10  # of processor time for one file
TEXTS = ("", "Hello world", "a b  c\n\n12345 'tis", "日本語 ñ 😀", "<s></s><unk>", "\x00\x01\xff", "ab" * 200)


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: object) -> None:
    if os.environ.get("LOUD"):
        sys.stderr.write(text.decode("utf-8", "replace"))


def load(file: str) -> bool:
    """Load the vocabulary, then the model, and use them. Returns False if llama.cpp refuses the file."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.vocab_only = True
    vocabulary = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
    if vocabulary:
        _tokenize(llama_cpp.llama_model_get_vocab(vocabulary))
        llama_cpp.llama_model_free(vocabulary)
    parameters.vocab_only = False
    model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
    if not model:
        return False
    _tokenize(llama_cpp.llama_model_get_vocab(model))
    _decode(model)
    llama_cpp.llama_model_free(model)
    return True


def _tokenize(vocab: ctypes.c_void_p) -> None:
    if llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return
    count = llama_cpp.llama_vocab_n_tokens(vocab)
    tokens = (ctypes.c_int32 * 4096)()
    for text in TEXTS:
        raw = text.encode()
        for special in (False, True):
            llama_cpp.llama_tokenize(vocab, raw, len(raw), tokens, 4096, True, special)
    buffer = ctypes.create_string_buffer(256)
    for token in {*range(min(count, 400)), max(count - 1, 0)} if count else ():
        llama_cpp.llama_token_to_piece(vocab, token, buffer, 256, 0, True)
        llama_cpp.llama_vocab_is_eog(vocab, token)
        llama_cpp.llama_vocab_get_attr(vocab, token)
        llama_cpp.llama_vocab_get_score(vocab, token)


def _decode(model: ctypes.c_void_p) -> None:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = 64
    parameters.n_batch = 32
    parameters.n_ubatch = 32
    parameters.n_threads = 1
    parameters.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        return
    batch = llama_cpp.llama_batch_init(4, 0, 1)
    batch.n_tokens = 4
    for index in range(4):
        batch.token[index] = index
        batch.pos[index] = index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = 1
    llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)


def result(file: str) -> str:
    """The result of a load in a process of its own."""
    child = os.fork()
    if child == 0:
        _limit()
        os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml_abort would start gdb
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(0 if load(file) else 1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return {0: "loaded", 1: "refused"}.get(os.WEXITSTATUS(status), f"ended with {os.WEXITSTATUS(status)}")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.alarm(4 * SECONDS)


if __name__ == "__main__":
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    for line in sys.stdin:
        print(result(line.rstrip("\n")), flush=True)
