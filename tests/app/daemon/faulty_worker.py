"""A real worker with device faults on demand: `faulty_worker.py --fd N`.

The environment variable TEST_FAULT names a file. When the file exists, its text selects a fault of the next step with
four rows, and the time of the fault is written to a file beside it.

    broken       an illegal access, which fails every call from then on (without a GPU: the error alone)
    assertion    an index out of bounds, which a kernel finds
    no_memory    an allocation beyond all memory
    endless      a kernel that never ends (without a GPU: a call)
    frozen       a call that never ends and lets no other thread run
    crashed      a read at address 0
    killed       SIGKILL
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from localllm.app.frames import Load
from localllm.app.worker import opening, worker
from localllm.backends.pytorch.kv import PagedKV
from localllm.engine.batch import Batch

ROWS = 4
STEPS = 100  # steps with four rows before the fault, so that every row has output
ILLEGAL = "CUDA error: an illegal memory access was encountered\nand advice"

fault = Path(os.environ["TEST_FAULT"])
steps = 0  # number of consecutive steps with four rows


def go_wrong(kind: str, device: torch.device) -> None:
    on_gpu = device.type != "cpu"
    match kind:
        case "broken" if on_gpu:
            nowhere = torch._C._construct_storage_from_data_pointer(16, device, 4096)
            torch.empty(0, device=device).set_(nowhere, 0, (1024,), (1,)).fill_(1.0)
        case "broken":
            raise torch.AcceleratorError(ILLEGAL)
        case "assertion":
            torch.arange(4, device=device)[torch.tensor([99], device=device)]
        case "no_memory":
            torch.empty(2**60, dtype=torch.uint8, device=device)
        case "endless" if on_gpu:
            torch.cuda._sleep(2**62)
        case "endless":
            time.sleep(3600)
        case "frozen":
            ctypes.PyDLL(None).sleep(3600)
        case "crashed":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    opened, copied = opening.open_model, PagedKV.copy

    def open_model(load: Load, progress: opening.Progress) -> opening.OpenModel:
        model = opened(load, progress)
        run = model.runner.run

        def counted(batch: Batch) -> Any:
            global steps
            steps = steps + 1 if batch.num_rows == ROWS else 0
            return run(batch)

        model.runner.run = counted  # type: ignore[method-assign]
        return model

    def copy(self: PagedKV, *args: Any) -> None:
        global steps
        if steps > STEPS and fault.exists():
            steps = 0
            kind = fault.read_text()
            fault.unlink()
            go_wrong(kind, self.keys.device)
        copied(self, *args)

    worker.open_model = open_model
    PagedKV.copy = copy  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
