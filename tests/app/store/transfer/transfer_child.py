"""Forks pulls of a model and kills them, for test_kill. Usage: python -m tests.app.store.transfer.transfer_child.

Each line of standard input is a number of microseconds. For each, a child process is forked, which downloads the file
set; it gets SIGKILL after this time. The reply is `killed` or `complete`. A fork is much faster than a new process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from localllm.app.store.remote import RemoteFile, Repository
from localllm.app.store.transfer import lock, publish
from localllm.app.store.transfer.disk import Disk
from localllm.app.store.transfer.http import Credentials, _certificates
from localllm.app.store.transfer.policy import Policy
from localllm.app.store.transfer.transfer import Transfer


def download(repository: Repository, policy: Policy, disk: Disk) -> int:
    """The part of `localllm pull` behind the metadata. Returns the number of bytes that arrived."""
    with lock.locked(repository.folder, disk, lambda: None):
        transfer = Transfer(repository.folder, repository.files, policy=policy, credentials=Credentials(), disk=disk)
        transfer.fetch([file for file in repository.files if file.name == "config.json"])
        transfer.fetch([file for file in repository.files if file.name != "config.json"])
        publish.publish(repository.folder, repository.commit, transfer.blob_names, disk)
        publish.write_ref(repository.folder, "main", repository.commit, disk)
        return transfer.progress().arrived


def arrived_file(folder: Path) -> Path:
    """Where a complete download writes how many bytes it requested."""
    return folder.with_suffix(".arrived")


def main() -> None:
    values = json.loads(sys.stdin.readline())
    files = tuple(RemoteFile(**file) for file in values["files"])
    repository = Repository("org/a", "c" * 40, files, Path(values["folder"]))
    policy = Policy(**values["policy"])
    _certificates()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            arrived = download(repository, policy, Disk())
            arrived_file(repository.folder).write_text(str(arrived))
            os._exit(0)
        time.sleep(int(line) / 1e6)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else "complete", flush=True)


if __name__ == "__main__":
    main()
