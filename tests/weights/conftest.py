"""Real wheels, a real package index on this machine, and tiny GGUF files."""

from __future__ import annotations

import base64
import hashlib
import http.server
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.weights.tiny_gguf import write_tiny_gguf

WheelMaker = Callable[..., Path]


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    home = tmp_path / "cache"
    monkeypatch.setenv("MLC_NB_HOME", str(home))
    return home


@pytest.fixture
def make_wheel(tmp_path: Path) -> WheelMaker:
    """Write a valid wheel with the given files; ``records`` replaces hashes in its RECORD."""

    def make(
        files: dict[str, bytes],
        *,
        name: str = "tiny_model",
        version: str = "1.0",
        records: dict[str, str] | None = None,
    ) -> Path:
        info = f"{name}-{version}.dist-info"
        content = {
            **files,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        hashes = {member: record_hash(data) for member, data in content.items()} | (records or {})
        rows = [f"{member},{hashes[member]},{len(data)}" for member, data in content.items()]
        content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        wheel = folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in content.items():
                archive.writestr(member, data)
        return wheel

    return make


def record_hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@dataclass
class Index:
    """A package index: what it offers, how slowly, and what was asked of it."""

    url: str = ""
    wheels: dict[str, tuple[Path, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bytes_a_second: float = float("inf")
    breaks_off_at: int | None = None

    def offer(self, wheel: Path, sha256: str | None = None) -> None:
        self.wheels[wheel.name] = (wheel, sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest())

    @property
    def downloads(self) -> int:
        return sum(path.endswith(".whl") for path in self.requests)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The only index that pip knows during the test."""
    served = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(self.path)
            name = self.path.rstrip("/").rpartition("/")[2]
            if name in served.wheels:
                self._send(served.wheels[name][0].read_bytes(), "application/octet-stream")
            else:
                links = [
                    f'<a href="/files/{file}#sha256={sha256}">{file}</a>'
                    for file, (_, sha256) in served.wheels.items()
                    if file.split("-")[0].replace("_", "-") == name
                ]
                self._send("\n".join(["<!DOCTYPE html><html><body>", *links, "</body></html>"]).encode(), "text/html")

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            step = 1 << 14
            try:
                for start in range(0, len(body), step):
                    self.wfile.write(body[start : start + step])
                    if kind == "text/html":
                        continue
                    time.sleep(step / served.bytes_a_second)
                    if served.breaks_off_at is not None and start >= served.breaks_off_at:
                        self.close_connection = True
                        return
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        served.url = f"http://127.0.0.1:{server.server_port}/simple"
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        monkeypatch.setenv("PIP_RETRIES", "0")
        yield served
        server.shutdown()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a few kilobytes with every kind of metadata and every supported block type."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path
