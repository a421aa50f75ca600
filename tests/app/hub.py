"""A hub on loopback with the requests of huggingface_hub and of ModelScope, and with faults on demand.

    hub      metadata, small files, redirects of large files        HF_ENDPOINT
    content  another port, which is another origin: large files     must never see a token

A fault is a function that answers a request instead of the hub. It is chosen by the stage of the request.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, unquote

LFS = (".safetensors", ".bin", ".gguf")
Stage = Literal["search", "metadata", "start", "middle"]


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Request:
    """One request, as a fault sees it."""

    handler: Handler
    stage: Stage
    path: str
    body: bytes = b""  # the complete file, or the complete reply
    start: int = 0  # of the requested range
    end: int = 0
    etag: str = ""


Fault = Callable[[Request], bool]  # True: the request is answered; False: the hub answers


@dataclass
class Hub:
    """The repositories of the server and its errors. `log` has every request, in order."""

    repos: dict[str, dict[str, bytes]]
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)  # repo → branch → commit
    gated: frozenset[str] = frozenset()
    token: str = ""  # required by the hub; empty: none
    breaks_in: str = ""  # a file whose first response ends in the middle of the body
    fails_with: int = 0  # status of every response; 0: normal responses
    stalls_in: str = ""  # a file whose response stops in the middle of the body and never continues
    fault: Fault | None = None
    redirects: bool = True  # large files come from the other port
    has_hashes: bool = True  # the metadata has the hashes of files
    has_sizes: bool = True
    has_etags: bool = True  # of the hub; the content server always has them
    speed: int = 0  # bytes/s of each response; 0: no limit
    card: dict[str, object] = field(default_factory=lambda: {"license": "apache-2.0"})
    prefix: str = ""  # path of the endpoint, such as /hf; requests to other paths get status 404
    log: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)  # of each request in `log`
    ranges: list[str] = field(default_factory=list)
    sent: int = 0  # bytes of files
    leaked: list[str] = field(default_factory=list)  # tokens that the content server saw
    url: str = ""
    content_url: str = ""
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    hashes: dict[bytes, str] = field(default_factory=dict)

    def commit(self, repo: str, revision: str) -> str | None:
        commits = self.revisions.get(repo, {"main": commit_of(repo)})
        if revision in commits:
            return commits[revision]
        is_commit = len(revision) >= 7
        return next((commit for commit in commits.values() if is_commit and commit.startswith(revision)), None)

    def sha256(self, data: bytes) -> str:
        if data not in self.hashes:
            self.hashes[data] = hashlib.sha256(data).hexdigest()
        return self.hashes[data]

    def etag(self, name: str, data: bytes) -> str:
        return self.sha256(data) if name.endswith(LFS) else git_oid(data)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of clients."""

    protocol_version = "HTTP/1.1"
    wbufsize = 65536
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        self.hub.log.append((self.command, path))
        self.hub.headers.append(dict(self.headers.items()))
        path = path.removeprefix(self.hub.prefix) if path.startswith((self.hub.prefix, "/content/")) else "/"
        if self.hub.fails_with:
            self.reply(self.hub.fails_with, b"{}")
            return
        routes: list[tuple[str, Callable[..., None]]] = [
            (r"/api/models", self._search),
            (r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._info),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
            (r"/content/([^/]+/[^/]+)/(.+)", self._content),
            (r"/api/v1/models/([^/]+/[^/]+)/repo/files", self._modelscope_info),
            (r"/models/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._modelscope_file),
        ]
        for pattern, route in routes:
            if match := re.fullmatch(pattern, path):
                arguments = [unquote(group) for group in match.groups()]
                if route == self._modelscope_info:
                    arguments.append(parse_qs(query).get("Revision", ["master"])[0])
                route(*arguments)
                return
        self.reply(404, b"{}")

    def _denied(self) -> bool:
        expected = f"Bearer {self.hub.token}"
        if not self.hub.token or self.headers.get("Authorization") == expected:
            return False
        self.reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        return True

    def _search(self) -> None:
        query = parse_qs(self.path.partition("?")[2])
        words = query.get("search", [""])[0].lower()
        suffix = "." + query["filter"][0].partition(",")[0]
        models = []
        for repo, files in self.hub.repos.items():
            if words in repo.lower() and any(name.endswith(suffix) for name in files):
                model = {"id": repo, "downloads": 1000, "likes": 7, "tags": ["license:apache-2.0"]}
                if "siblings" in query.get("expand", []):
                    model["siblings"] = [{"rfilename": name} for name in files]
                models.append(model)
        self._reply_or_fault("search", json.dumps(models).encode())

    def _info(self, repo: str, revision: str) -> None:
        if self._denied():
            return
        if repo not in self.hub.repos:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        sha = self.hub.commit(repo, revision)
        if sha is None:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [self._sibling(name, data) for name, data in self.hub.repos[repo].items()]
        info = {"id": repo, "sha": sha, "siblings": siblings, "cardData": self.hub.card}
        self._reply_or_fault("metadata", json.dumps(info).encode())

    def _sibling(self, name: str, data: bytes) -> dict[str, object]:
        sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": git_oid(b"pointer")}
        if not self.hub.has_hashes:
            return {"rfilename": name, "size": len(data)} if self.hub.has_sizes else {"rfilename": name}
        if name.endswith(LFS):
            sibling["lfs"] = {"sha256": self.hub.sha256(data), "size": len(data), "pointerSize": 134}
        else:
            sibling["blobId"] = git_oid(data)
        return sibling

    def _modelscope_info(self, repo: str, revision: str) -> None:
        if repo not in self.hub.repos or revision != "master":
            self.reply(404, json.dumps({"Code": 10010205001, "Message": "not found", "Success": False}).encode())
            return
        files = [{"Path": "sub", "Name": "sub", "Type": "tree", "Size": 0}]
        for name, data in self.hub.repos[repo].items():
            files.append({"Path": name, "Type": "blob", "Size": len(data), "Sha256": self.hub.sha256(data)})
        reply = {"Code": 200, "Data": {"Files": files, "LatestCommitter": {"Id": commit_of(repo)}}, "Success": True}
        self._reply_or_fault("metadata", json.dumps(reply).encode())

    def _modelscope_file(self, repo: str, revision: str, name: str) -> None:
        self._send_file(name, self.hub.repos[repo][name])

    def _file(self, repo: str, sha: str, name: str) -> None:
        if self._denied():
            return
        if repo in self.hub.gated:
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if name not in self.hub.repos.get(repo, {}):
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        data = self.hub.repos[repo][name]
        sha = self.hub.commit(repo, sha) or sha
        if not name.endswith(LFS) or not self.hub.redirects:
            no_etag = {} if self.hub.has_etags else {"ETag": '"odd"'}
            self._send_file(name, data, {"X-Repo-Commit": sha, **no_etag})
            return
        headers = {
            "Location": f"{self.hub.content_url}/content/{repo}/{name}?signature=1",
            "X-Linked-Etag": f'"{self.hub.etag(name, data)}"',
            "X-Linked-Size": str(len(data)),
            "X-Repo-Commit": sha,
        }
        if not self.hub.has_etags:
            del headers["X-Linked-Etag"]
        self.reply(302, b"", headers)

    def _content(self, repo: str, name: str) -> None:
        if authorization := self.headers.get("Authorization"):
            self.hub.leaked.append(authorization)
        self._send_file(name, self.hub.repos[repo][name])

    def _send_file(self, name: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        etag = f'"{self.hub.etag(name, data)}"'
        start, end = self._range(len(data))
        request = Request(self, "middle" if start else "start", self.path, data, start, end, etag)
        if self.command == "GET" and self._breaks(name, request):
            return
        if self.command == "GET" and self.hub.fault is not None and self.hub.fault(request):
            return
        self.send_range(request, {"ETag": etag, **(headers or {})})

    def send_range(self, request: Request, headers: Mapping[str, str] | None = None, *, status: int = 0) -> None:
        """The correct reply to a request for a file or a range of it."""
        fields = {"Accept-Ranges": "bytes", "ETag": request.etag, **(headers or {})}
        partial = "Range" in self.headers and self.command == "GET"
        if partial:
            fields.setdefault("Content-Range", f"bytes {request.start}-{request.end - 1}/{len(request.body)}")
        self.reply(status or (206 if partial else 200), memoryview(request.body)[request.start : request.end], fields)

    def _range(self, size: int) -> tuple[int, int]:
        if self.command != "GET" or "Range" not in self.headers:
            return 0, size
        self.hub.ranges.append(self.headers["Range"])
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        return int(first), int(last) + 1 if last else size

    def _breaks(self, name: str, request: Request) -> bool:
        """The simple faults of one file: a reply that ends or stops in the middle."""
        if name == self.hub.breaks_in:
            self.hub.breaks_in = ""
            self.send_start(request, (request.end - request.start) // 2)
            self.close_connection = True
            return True
        if name == self.hub.stalls_in:
            self.send_start(request, 1)
            self.hub.stalled.set()
            self.hub.closing.wait()
            return True
        return False

    def send_start(self, request: Request, length: int) -> None:
        """Send the headers of the complete reply, and the first `length` bytes."""
        partial = "Range" in self.headers
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {request.start}-{request.end - 1}/{len(request.body)}")
        self.send_header("Content-Length", str(request.end - request.start))
        self.send_header("ETag", request.etag)
        self.end_headers()
        self.wfile.write(request.body[request.start : request.start + length])
        self.wfile.flush()

    def _reply_or_fault(self, stage: Stage, body: bytes) -> None:
        request = Request(self, stage, self.path, body, 0, len(body))
        if self.hub.fault is None or not self.hub.fault(request):
            self.reply(200, body)

    def reply(self, status: int, body: bytes | memoryview, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete reply."""
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self._send_body(body)
        self.wfile.flush()

    def _send_body(self, body: bytes | memoryview) -> None:
        step = self.hub.speed // 50 or 2**20
        for start in range(0, len(body), step):
            block = body[start : start + step]
            self.wfile.write(block)
            self.hub.sent += len(block)
            if self.hub.speed:
                self.wfile.flush()
                self.hub.closing.wait(0.02)


class Server(ThreadingHTTPServer):
    """A server that is silent about clients that leave."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Run the server of a hub on two free ports; `hub.url` is its address."""
    handler = type("HubHandler", (Handler,), {"hub": hub})
    servers = [Server(("127.0.0.1", 0), handler), Server(("127.0.0.1", 0), handler)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    hub.url, hub.content_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        hub.closing.set()
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


CONFIG = json.dumps(
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
).encode()


# Tensors of every model with the architecture and the two layers of CONFIG; here they are empty.
REQUIRED = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.1.post_attention_layernorm.weight",
)


# The smallest tokenizer of the class of the architecture: a byte-level vocabulary has the letter of a space.
TOKENIZER = json.dumps(
    {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"Ġ": 0}, "merges": []}}
).encode()


def safetensors(length: int, seed: int = 0, tensor: str = "weight") -> bytes:
    """A weight file with one tensor of random bytes, so that no two parts of the file are equal."""
    header: dict[str, object] = {tensor: {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}
    if tensor in ("weight", "weight0"):  # of the first file
        header |= {name: {"dtype": "U8", "shape": [0], "data_offsets": [length, length]} for name in REQUIRED}
    return _with_header(header, random.Random(seed).randbytes(length))


def _with_header(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def adapter_files() -> dict[str, bytes]:
    """The files of an adapter that localllm accepts: rank 4, one module."""
    name = "base_model.model.model.layers.0.self_attn.v_proj"
    header: dict[str, object] = {
        f"{name}.lora_A.weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        f"{name}.lora_B.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [128, 256]},
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj"]}
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": _with_header(header, bytes(256)),
        "README.md": b"card",
    }


def model_files(length: int = 300_000, *, shards: int = 1, seed: int = 0) -> dict[str, bytes]:
    """The files of a model that localllm accepts; the weights have `length` bytes."""
    files = {"config.json": CONFIG, "tokenizer.json": TOKENIZER, "README.md": b"card"}
    if shards == 1:
        return {**files, "model.safetensors": safetensors(length, seed)}
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = dict.fromkeys(REQUIRED, names[0])
    for number, name in enumerate(names):
        weight_map[f"weight{number}"] = name
        files[name] = safetensors(length // shards, seed + number, f"weight{number}")
    return {**files, "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}
