"""Opens the tokenizer of a model: `python -m localllm.app.worker.tokenizer_child FOLDER`.

Prints the reason why it cannot be used, and nothing for a sound one. A separate process opens it: the files of a hub
must not end or stop a command, or the daemon.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ...engine.errors import ModelRefused
from ...engine.files.model_files import read_architecture
from ..chat.tokenizer.huggingface import ChatTokenizer


def main(folder: str) -> None:
    try:
        ChatTokenizer(Path(folder), read_architecture(Path(folder)).eos_ids)
    except ModelRefused as error:
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
