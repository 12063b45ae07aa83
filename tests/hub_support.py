"""A hub on this machine: what the clients of Hugging Face and ModelScope ask of one data set, over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves a folder as the data set owner/name, and as plain files under /files.

    Attributes:
        asked: the path of every request.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@contextmanager
def hub_of(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        parts = urlsplit(self.path)
        path, query = parts.path, parse_qs(parts.query)
        if path.startswith("/files/"):
            self._file(path.removeprefix("/files/"))
        elif path.startswith("/datasets/owner/name/resolve/"):
            self._file(path.removeprefix("/datasets/owner/name/resolve/").partition("/")[2])
        elif path.startswith("/api/datasets/owner/name/tree/"):
            inside = path.removeprefix("/api/datasets/owner/name/tree/").partition("/")[2]
            self._tree(self.server.folder / inside, recursive=query["recursive"] == ["true"])
        elif path.startswith("/api/datasets/owner/name"):
            siblings = [{"rfilename": name} for name in self.server.files()]
            self._json({"id": "owner/name", "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
        elif path == "/api/v1/datasets/owner/name/repo/tree":
            files = [{**self._entry(name), "Name": name, "Path": name, "Type": "blob"} for name in self.server.files()]
            for file in files:
                file.update(Size=file["size"], Sha256=file["sha256"], Revision=COMMIT)
            self._json({"Code": 200, "Success": True, "Data": {"Files": files, "TotalCount": len(files)}})
        elif path == "/api/v1/datasets/owner/name/repo":
            self._file(query["FilePath"][0])
        else:
            self._missing()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        self._json([self._entry(name) for name in self.server.files() if name in wanted])

    def _tree(self, folder: Path, recursive: bool) -> None:
        if not folder.is_dir():
            return self._missing()
        found = sorted(folder.rglob("*") if recursive else folder.iterdir())
        self._json([self._entry(str(path.relative_to(self.server.folder))) for path in found])

    def _entry(self, name: str) -> dict[str, object]:
        if (self.server.folder / name).is_dir():
            return {"type": "directory", "path": name, "size": 0, "oid": COMMIT}
        data = (self.server.folder / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": digest[:40], "sha256": digest}

    def _file(self, name: str) -> None:
        path = self.server.folder / name
        if not path.is_file():
            return self._missing()
        data = path.read_bytes()
        self._send(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self) -> None:
        self._send(b"{}", {"X-Error-Code": "EntryNotFound"}, 404)

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""
