"""Downloads from a hub on loopback: localllm beside aria2c and huggingface_hub, interleaved.

Usage: python scripts/bench/downloads.py [--size GIB] [--small COUNT] [--rounds N] [--save NAME]

`ours` is the median time of localllm, `peer` that of the other program; `ratio` is above 1 if localllm is faster. The
server is a process of its own that sends files with sendfile; it takes some percent of the processor time of a
download. All programs write to the same folder. localllm syncs its files; of the others only "aria2c with sync" does.
A download on loopback uses every core, so that the time of the hash adds to it. `LINK` is the speed of a network for
which cores are free.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rows import Row, parser, row, save

BLOCK = 2**20
COMMIT = "a" * 40
SERVER = "server"
OURS = "localllm"
OVER_LINK = "localllm at 2.5 Gbit/s"
LINK = 2_500_000_000 // 8  # bytes/s
LARGE = "org/large"
SMALL = "org/small"
Results = dict[tuple[str, str], list["Usage"]]  # program, repository → one entry for each round
Names = dict[str, list[dict[str, object]]]  # repository → its files

CHILD = """
import sys
from dataclasses import replace
from pathlib import Path
from localllm.app.store.names import HubName
from localllm.app.store.hub.lookup import lookup
from localllm.app.store.transfer import publish
from localllm.app.store.transfer.disk import Disk
from localllm.app.store.transfer.http import Credentials
from localllm.app.store.transfer.policy import Policy
from localllm.app.store.transfer.transfer import Transfer
from localllm.app.store.transfer import partial

if sys.argv[2] == "unhashed":
    class NoHash:
        def update(self, data): pass
        def hexdigest(self): return ""
        def copy(self): return self
    partial.new_hash = lambda file: NoHash()
    partial.matches = lambda file, digest: True
repository = lookup(HubName(sys.argv[1]))
policy = Policy(bandwidth=int(sys.argv[3]))
transfer = Transfer(repository.folder, repository.files, policy=policy, credentials=Credentials(), disk=Disk())
transfer.fetch(repository.files)
publish.publish(repository.folder, repository.commit, transfer.blob_names, Disk())
"""
HUGGINGFACE_HUB = """
import sys
from huggingface_hub import snapshot_download
snapshot_download(sys.argv[1], max_workers=16)
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--size", type=float, default=4.0, help="GiB of the large file set")
    options.add_argument("--files", type=int, default=4, help="number of large files")
    options.add_argument("--small", type=int, default=20_000, help="number of small files")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, default=None, help="folder on the disk to measure")
    options.add_argument("--save", default="", help="name of the results file; empty: only print the rows")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name)
        names = {
            LARGE: make_large(root / "served" / "large", arguments.size, arguments.files),
            SMALL: make_small(root / "served" / "small", arguments.small),
        }
        index = root / "index.json"
        index.write_text(json.dumps(names))
        server = subprocess.Popen([sys.executable, __file__, SERVER, str(index)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            measure(root, url, names, arguments.rounds, arguments.save)
        finally:
            server.kill()
            server.wait()


def make_large(folder: Path, gib: float, count: int) -> list[dict[str, object]]:
    """Files of random bytes, repeated with a counter, so that no two blocks are equal."""
    folder.mkdir(parents=True)
    block = os.urandom(BLOCK)
    files = []
    for number in range(count):
        path = folder / f"model-{number}.safetensors"
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for index in range(int(gib * 1024 / count)):
                data = number.to_bytes(8, "little") + index.to_bytes(8, "little") + block[16:]
                digest.update(data)
                file.write(data)
        files.append({"name": path.name, "path": str(path), "size": path.stat().st_size, "sha256": digest.hexdigest()})
    return files


def make_small(folder: Path, count: int) -> list[dict[str, object]]:
    folder.mkdir(parents=True)
    files = []
    for number in range(count):
        path = folder / f"{number:05}.json"
        data = b'{"number": %d, "rest": "%b"}' % (number, b"x" * 1000)
        path.write_bytes(data)
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        files.append({"name": f"part{number // 1000}/{path.name}", "path": str(path), "size": len(data), "oid": oid})
    return files


@dataclass(frozen=True)
class Usage:
    """Of one download: seconds, seconds of processor time, MiB of resident memory."""

    seconds: float
    cpu: float
    resident: float


@dataclass(frozen=True)
class Program:
    """A program that downloads a repository. `beside` names the localllm program that its row compares it with."""

    name: str
    repo: str
    command: Callable[[Path], list[str]]
    beside: str = OURS


def programs(addresses: Path) -> list[Program]:
    """`addresses`: the file with the addresses of the large files."""
    portable = [
        Program(OURS, LARGE, child(LARGE)),
        Program("localllm without hashes", LARGE, child(LARGE, "unhashed")),
        Program("huggingface_hub", LARGE, huggingface_hub(LARGE)),
        Program(OVER_LINK, LARGE, child(LARGE, bandwidth=LINK), beside=OVER_LINK),
        Program(f"{OVER_LINK} without hashes", LARGE, child(LARGE, "unhashed", LINK), beside=OVER_LINK),
        Program(OURS, SMALL, child(SMALL)),
        Program("huggingface_hub", SMALL, huggingface_hub(SMALL)),
    ]
    if not shutil.which("aria2c"):
        print("aria2c is not installed: no comparison with it", file=sys.stderr)
        return portable
    return [
        Program("aria2c, 16 connections", LARGE, lambda target: aria2c(addresses, target)),
        Program("aria2c with sync, 16 connections", LARGE, lambda target: aria2c_with_sync(addresses, target)),
        *portable,
    ]


def child(repo: str, hashes: str = "hashed", bandwidth: int = 0) -> Callable[[Path], list[str]]:
    return lambda _: [sys.executable, "-c", CHILD, repo, hashes, str(bandwidth)]


def huggingface_hub(repo: str) -> Callable[[Path], list[str]]:
    return lambda _: [sys.executable, "-c", HUGGINGFACE_HUB, repo]


def measure(root: Path, url: str, names: Names, rounds: int, saved_as: str) -> None:
    addresses = root / "addresses"
    addresses.write_text("".join(f"{url}/{LARGE}/resolve/{COMMIT}/{file['name']}\n" for file in names[LARGE]))
    measured = [program for program in programs(addresses) if names[program.repo]]
    results: Results = {}
    for _ in range(rounds):
        for program in measured:
            target = root / "target"
            usage = run(program.command(target), target, url)
            results.setdefault((program.name, program.repo), []).append(usage)
            shutil.rmtree(target)
            os.sync()
    save(saved_as, make_rows(measured, results, names))


def make_rows(measured: Sequence[Program], results: Results, names: Names) -> Iterator[Row]:
    """One row for each program beside localllm: medians, and the largest resident memory of localllm.

    The processor time depends less on other programs of the machine than the seconds do.
    """
    for program in measured:
        if program.name == program.beside:
            continue
        actual = results[program.beside, program.repo]
        expected = results[program.name, program.repo]
        seconds = statistics.median(usage.seconds for usage in actual)
        peer = statistics.median(usage.seconds for usage in expected)
        files = names[program.repo]
        total = sum(int(str(file["size"])) for file in files)
        yield row(
            f"download of {len(files)} files, {total / 2**20:.0f} MiB, beside {program.name}",
            seconds,
            "s",
            peer=round(peer, 2),
            ratio=peer / seconds,
            cpu=round(statistics.median(usage.cpu for usage in actual), 2),
            peer_cpu=round(statistics.median(usage.cpu for usage in expected), 2),
            resident_mib=round(max(usage.resident for usage in actual)),
        )


def aria2c_with_sync(addresses: Path, target: Path) -> list[str]:
    return ["sh", "-c", f'"$@" && sync -f {shlex.quote(str(target))}', "sh", *aria2c(addresses, target)]


def aria2c(addresses: Path, target: Path) -> list[str]:
    options = "-x16 -s16 -j4 -k4M --file-allocation=none --console-log-level=error --summary-interval=0 --quiet".split()
    return ["aria2c", *options, "-d", str(target), "-i", str(addresses)]


def run(command: list[str], target: Path, url: str) -> Usage:
    """Run a command that downloads to a new cache."""
    environment = {
        **os.environ,
        "HF_HOME": str(target),
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    target.mkdir()
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{command[0]} failed with {status}")
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return Usage(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / unit)


def serve(index: Path) -> None:
    """A server for one thread per connection, with sendfile."""
    names = json.loads(index.read_text())
    files = {(repo, file["name"]): file for repo, entries in names.items() for file in entries}
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer_all, args=(connection, names, files), daemon=True).start()


def answer_all(connection: socket.socket, names: dict[str, object], files: dict[tuple[str, str], dict]) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = connection.makefile("rb", buffering=16384)
    try:
        while line := reader.readline():
            method, path, _ = line.decode().split(" ")
            headers = {}
            while (header := reader.readline()) not in (b"\r\n", b""):
                name, _, value = header.decode().partition(":")
                headers[name.lower()] = value.strip()
            answer(connection, method, path.partition("?")[0], headers, names, files)
    except OSError:
        pass
    finally:
        connection.close()


def answer(
    connection: socket.socket,
    method: str,
    path: str,
    headers: dict[str, str],
    names: dict[str, object],
    files: dict[tuple[str, str], dict],
) -> None:
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/.+", path):
        siblings = []
        for file in names[match[1]]:
            sibling = {"rfilename": file["name"], "size": file["size"], "blobId": file.get("oid", COMMIT)}
            if "sha256" in file:
                sibling["lfs"] = {"sha256": file["sha256"], "size": file["size"], "pointerSize": 134}
            siblings.append(sibling)
        send(connection, 200, json.dumps({"id": match[1], "sha": COMMIT, "siblings": siblings}).encode())
        return
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.+", path):
        send(connection, 200, json.dumps([tree_entry(file) for file in names[match[1]]]).encode())
        return
    match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
    file = files.get((match[1], match[2])) if match else None
    if file is None:
        send(connection, 404, b"{}")
        return
    send_file(connection, method, file, headers.get("range", ""))


def tree_entry(file: dict) -> dict[str, object]:
    entry = {"type": "file", "path": file["name"], "size": file["size"], "oid": file.get("oid", COMMIT)}
    if "sha256" in file:
        entry["lfs"] = {"oid": file["sha256"], "size": file["size"], "pointerSize": 134}
    return entry


def send(connection: socket.socket, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def send_file(connection: socket.socket, method: str, file: dict, ranges: str) -> None:
    size, start = file["size"], 0
    end = size
    if ranges:
        first, _, last = ranges.removeprefix("bytes=").partition("-")
        start = int(first)
        end = int(last) + 1 if last else size
    fields = [
        f"HTTP/1.1 {206 if ranges else 200} OK",
        "Accept-Ranges: bytes",
        f'ETag: "{file.get("sha256") or file["oid"]}"',
        f"X-Repo-Commit: {COMMIT}",
        f"Content-Length: {end - start}",
    ]
    if ranges:
        fields.append(f"Content-Range: bytes {start}-{end - 1}/{size}")
    connection.sendall("\r\n".join([*fields, "", ""]).encode())
    if method == "GET":
        with open(file["path"], "rb") as source:  # noqa: PTH123 - the path is text
            connection.sendfile(source, start, end - start)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if sys.argv[1:2] == [SERVER]:
        serve(Path(sys.argv[2]))
    else:
        main()
