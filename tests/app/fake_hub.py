"""A fake Hugging Face server on loopback, with the HTTP requests of pull and with errors on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Hub:
    """The repos of the server and its errors. `log` has every request, in order."""

    repos: dict[str, dict[str, bytes]]
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)  # repo → branch → commit
    gated: frozenset[str] = frozenset()
    breaks_in: str = ""  # a file whose first response ends in the middle of the body
    fails_with: int = 0  # status of every response; 0: normal responses
    stalls_in: str = ""  # a file whose response stops in the middle of the body and never continues
    log: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    url: str = ""
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)

    def commit(self, repo: str, revision: str) -> str | None:
        commits = self.revisions.get(repo, {"main": commit_of(repo)})
        if revision in commits:
            return commits[revision]
        is_commit = len(revision) >= 7
        return next((commit for commit in commits.values() if is_commit and commit.startswith(revision)), None)


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of huggingface_self.hub."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.log.append((self.command, path))
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.hub.fails_with:
            self._send(self.hub.fails_with, b"{}")
        elif info:
            self._info(info[1], unquote(info[2]))
        elif file:
            self._file(*file.groups())
        else:
            self._send(404, b"{}")

    def _info(self, repo: str, revision: str) -> None:
        if repo not in self.hub.repos:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        sha = self.hub.commit(repo, revision)
        if sha is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.repos[repo].items()]
        self._send(200, json.dumps({"id": repo, "sha": sha, "siblings": siblings}).encode())

    def _file(self, repo: str, sha: str, name: str) -> None:
        if repo in self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        data = self.hub.repos[repo][name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": sha}
        start = 0
        if self.command == "GET" and "Range" in self.headers:
            self.hub.ranges.append(self.headers["Range"])
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
        if self.command == "GET" and name == self.hub.breaks_in:
            self.hub.breaks_in = ""
            self._send_start(data, len(data) // 2)
            self.connection.close()
            return
        if self.command == "GET" and name == self.hub.stalls_in:
            self._send_start(data, 1)
            self.hub.stalled.set()
            self.hub.closing.wait(30)
            return
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], headers)

    def _send_start(self, data: bytes, length: int) -> None:
        """Send the headers of all data, and the first `length` bytes."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:length])
        self.wfile.flush()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Run the server of a hub on a free port; `hub.url` is its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
