"""`inspect` and `fit` for clients of the daemon."""

from __future__ import annotations

import asyncio
import sys

import pytest

from localllm.app.daemon import examine
from localllm.app.errors import InvalidRequest, ModelNotFound, WorkerDied


def test_model_is_inspected_and_measured_in_a_child_process() -> None:
    async def both() -> None:
        result = await examine.inspect("guide")
        assert (result["architecture"], result["usable"]) == ("qwen3", True)
        [entry] = await examine.fit("guide", context=4096, parallel=2, quant="int8", backend="cpu")
        assert (entry["backend"], entry["fits"], entry["context"], entry["parallel"]) == ("cpu", False, 4096, 2)

    asyncio.run(both())


def test_errors_of_the_command_are_errors_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="nonsense"):
        asyncio.run(examine.inspect("nonsense"))
    for path in ("/etc", "./x", "~", "../x"):
        with pytest.raises(InvalidRequest, match="is a path"):
            asyncio.run(examine.inspect(path))
    with pytest.raises(InvalidRequest):
        asyncio.run(examine.inspect("--help"))
    monkeypatch.setattr(examine, "COMMAND", (sys.executable, "-c", "print('no json'); raise SystemExit(1)"))
    with pytest.raises(WorkerDied, match="localllm inspect crashed"):
        asyncio.run(examine.inspect("guide"))
    monkeypatch.setattr(examine, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(examine, "SECONDS", 0.2)
    with pytest.raises(WorkerDied, match="no result within"):
        asyncio.run(examine.inspect("guide"))
