"""Reranking over HTTP: a real worker runs a model that writes a known judgement of each document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from localllm.app.api.rerank import INSTRUCTION
from localllm.app.chat.calls.records import FORMATS
from localllm.app.daemon.process import COMMAND

from ..chat.template.call_templates import template_of
from ..script_model import write_script_model
from .conftest import Daemon

MODEL = "test/Qwen3-Reranker-tiny"
JUDGED = {"cats purr": "yes", "cars rust": "no", "lions roar": "yes"}


@pytest.mark.slow
def test_judgements_of_a_model(short_folder: Callable[[], Path]) -> None:
    folder = short_folder()
    repo = folder / "hub/models--test--Qwen3-Reranker-tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123456789abcdef")
    prefix = f"<Instruct>: {INSTRUCTION}\n<Query>: animals\n<Document>: "
    scripts = {prefix + document: word for document, word in JUDGED.items()}
    scripts["words"] = "yes no yes no yes no"  # so that each word is one token
    write_script_model(repo / "snapshots" / "0123456789abcdef", scripts, template_of(FORMATS[0]))
    env = {"TEST_WORKER": json.dumps(COMMAND), "OMP_NUM_THREADS": "1"}
    daemon = Daemon(folder, env=env, backend="cpu", dtype="float32", cache_mib=16, max_rows=8, threads=1)
    with daemon.http as client:
        body = {"model": MODEL, "query": "animals", "documents": list(JUDGED)}
        reply = client.post(f"{daemon.url}/v1/rerank", json=body, timeout=httpx.Timeout(100))
        assert reply.status_code == 200, reply.text
        scores = {result["document"]["text"]: result["relevance_score"] for result in reply.json()["results"]}
        assert [*scores][-1] == "cars rust"
        assert scores == pytest.approx({"cats purr": 1.0, "lions roar": 1.0, "cars rust": 0.0}, abs=0.01)
        pairs = {"model": MODEL, "text_1": "animals", "text_2": ["cars rust", "cats purr"]}
        data = client.post(f"{daemon.url}/v1/score", json=pairs).json()["data"]
        assert [round(entry["score"], 2) for entry in data] == [0.0, 1.0]
        refused = client.post(f"{daemon.url}/v1/rerank", json=body | {"model": "guide"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert daemon.stop() == 0, daemon.log
