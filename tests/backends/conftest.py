"""Tests that run llama.cpp in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of llama.cpp in a thread of its own. On a CPU with AMX, llama.cpp configures the tiles of a thread
    once; the CPU kernels of an earlier test release them, and llama.cpp then ends the process with SIGILL. No product
    process runs two backends."""
    if not {"llamacpp", "gguf_models"} & vars(pyfuncitem.module).keys():
        return None
    names = pyfuncitem._fixtureinfo.argnames
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names}).result()
    return True
