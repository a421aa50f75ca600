"""A daemon whose real worker runs a model that writes known texts: the answers that an agent gets.

The question QUESTION has the answer PLAN with two calls. After their results the answer is ANSWER.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.app.chat.calls.records import FORMATS
from localllm.app.chat.calls.writing import example
from localllm.app.daemon.process import COMMAND

from ..chat.template.call_templates import template_of
from ..script_model import Markers, write_script_model
from .conftest import Daemon

HERMES = FORMATS[0]
MODEL = "test/script"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Tromsø 🙂", "days": 30}),
    ("get_weather", {"city": "Rome", "days": 3}),
]
PLAN = "I will look at both."
ANSWER = "Snow in Tromsø, sun in Rome."
QUESTION = "How is the weather?"
RESULTS = {"Tromsø 🙂": "snow", "Rome": "sun"}
# The last message selects the script.
SCRIPTS = {QUESTION: f"{PLAN}\n{example(HERMES, CALLS)}", "sun": ANSWER, "stop": "one END two"}


def serve(folder: Path) -> Iterator[Daemon]:
    """Start a daemon in the folder, and stop it after the yield."""
    repo = folder / "hub/models--test--script"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123456789abcdef")
    markers = Markers(("<tool_call>", "</tool_call>"))
    snapshot = repo / "snapshots" / "0123456789abcdef"
    write_script_model(snapshot, SCRIPTS, template_of(HERMES), markers=markers, preferred=['"', "}"])
    env = {"TEST_WORKER": json.dumps(COMMAND), "OMP_NUM_THREADS": "1"}
    daemon = Daemon(folder, env=env, backend="cpu", dtype="float32", cache_mib=16, max_rows=8, threads=1)
    yield daemon
    assert daemon.stop() == 0, daemon.log
    assert "Traceback" not in daemon.log, daemon.log
