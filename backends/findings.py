"""What self-tests of kernels found, as it is kept between starts: a file for each device, number format and set of
versions. Reading it takes no tensor library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path


@dataclass(slots=True)
class Findings:
    """Verdicts by op and implementation, kept in a file; an empty one is a pass."""

    file: Path
    device: str  # for people
    verdicts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, device: str) -> Findings:
        """What the file holds; nothing where there is none, or none that can be read."""
        try:
            verdicts = json.loads(file.read_text("utf-8"))["verdicts"]
            return cls(file, device, {str(key): str(reason) for key, reason in verdicts.items()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return cls(file, device)

    def write(self, fallbacks: Sequence[str] = ()) -> None:
        """Where the folder cannot be written, the next start tests again."""
        date = datetime.now(UTC).date().isoformat()
        told = {"device": self.device, "date": date, "fallbacks": list(fallbacks), "verdicts": self.verdicts}
        beside = self.file.with_suffix(".new")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(told, indent=1), "utf-8")
            beside.replace(self.file)
        except OSError:
            with suppress(OSError):
                beside.unlink()


def told(folder: Path) -> dict[str, str]:
    """For people: the outcome of the newest self-test on each device, by its name."""
    found: list[tuple[float, str, str]] = []
    for file in folder.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # broken, or gone meanwhile
            kept = json.loads(file.read_text("utf-8"))
            outcome = "; ".join(kept["fallbacks"]) or f"all {len(kept['verdicts'])} kernels are right"
            found.append((file.stat().st_mtime, str(kept["device"]), f"{outcome} ({kept['date']})"))
    return {device: outcome for _, device, outcome in sorted(found)}
