"""Real kernels for the notebook tests."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

import mlc_nb

BUSY_AT_SHUTDOWN = re.compile(
    r"\[IPKernelApp\] ERROR \| Exception in message handler:\n(?:(?!mlc_nb).)*?"
    r"zmq\.error\.ZMQError: Socket operation on non-socket\n",
    re.DOTALL,
)
RunningCell = Callable[["Run"], None]


@dataclass
class Run:
    """What came back from one cell, in the order and at the time it came."""

    messages: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def of_type(self, *kinds: str) -> list[dict[str, Any]]:
        return [message["content"] for _, message in self.messages if message["msg_type"] in kinds]

    @property
    def displays(self) -> dict[str, dict[str, Any]]:
        """The last state of each display, by display_id, as a notebook saves it."""
        last = {}
        for content in self.of_type("display_data", "update_display_data"):
            last[content["transient"].get("display_id", str(len(last)))] = content["data"]
        return last

    @property
    def answer(self) -> str:
        """The Markdown that the cell is left with."""
        answers = [data["text/markdown"] for data in self.displays.values() if "text/markdown" in data]
        assert len(answers) <= 1, f"{len(answers)} copies of the answer"
        return answers[0] if answers else ""

    @property
    def answer_times(self) -> list[float]:
        """When each state of the answer came."""
        return [moment for moment, message in self.messages if "text/markdown" in message["content"].get("data", {})]

    @property
    def text(self) -> str:
        """The answer, character by character what the model wrote, in whatever format it is shown."""
        texts = [data["text/plain"] for data in self.displays.values() if "text/html" not in data]
        return "".join(texts)

    @property
    def notes(self) -> list[str]:
        """The small lines that the cell is left with."""
        return [data["text/plain"] for data in self.displays.values() if "<small" in data.get("text/html", "")]

    @property
    def note(self) -> str:
        return self.notes[-1] if self.notes else ""

    def stream(self, name: str) -> str:
        return "".join(content["text"] for content in self.of_type("stream") if content["name"] == name)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return self.of_type("error")


class Kernel:
    """A kernel in its own process, with what it writes to stderr in a file.

    ``packages`` is a folder of packages that go before the installed ones.
    """

    def __init__(self, folder: Path, packages: Path | None = None) -> None:
        self.stderr_path = folder / "stderr"
        self._stderr = self.stderr_path.open("w")
        # Over TCP, ipykernel warns on stderr that nothing is encrypted.
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "ipc"))
        environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython")}
        if packages is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(packages), str(Path(mlc_nb.__file__).parents[1])])
        self.manager.start_kernel(env=environment, stderr=self._stderr, cwd=str(folder))
        self.connect()

    @property
    def complaints(self) -> str:
        """What the process wrote to stderr, but for what ipykernel says itself when any busy cell is shut down."""
        return BUSY_AT_SHUTDOWN.sub("", self.stderr_path.read_text())

    def connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.pid)

    def run(self, code: str, *, during: RunningCell | None = None, timeout: float = 120) -> Run:
        """Execute a cell; ``during`` is called after each of its messages."""
        run, started = Run(), time.monotonic()
        message_id = self.client.execute(code)
        while True:
            left = started + timeout - time.monotonic()
            assert left > 0, f"the cell took longer than {timeout} s"
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=min(left, 1))
                if message["parent_header"].get("msg_id") != message_id:
                    continue
                run.messages.append((time.monotonic(), message))
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    break
                if during is not None:
                    during(run)
        run.seconds = time.monotonic() - started
        while run.reply == {}:
            reply = self.client.get_shell_msg(timeout=10)
            if reply["parent_header"].get("msg_id") == message_id:
                run.reply = reply["content"]
        return run

    def start(self, code: str) -> None:
        """Begin a long chat cell and return when its first words are shown."""
        message_id = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            mine = message["parent_header"].get("msg_id") == message_id
            assert message["msg_type"] != "error", message["content"]
            if mine and len(message["content"].get("data", {}).get("text/markdown", "")) > 20:
                return

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self._stderr.close()


def value_of(kernel: Kernel, expression: str) -> Any:
    """The value of an expression in the kernel, as JSON can hold it."""
    run = kernel.run(f"import json; print(json.dumps({expression}))")
    assert run.reply["status"] == "ok", run.errors
    return json.loads(run.stream("stdout"))


@pytest.fixture(scope="session")
def older_ipykernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the oldest ipykernel that we support."""
    folder = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "ipykernel==6.30.*"]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode:
        pytest.skip(f"no package index here: {installed.stderr[-200:]}")
    return folder


@pytest.fixture
def fresh_kernel(tmp_path: Path, warm_model: Path) -> Iterator[Kernel]:
    """A kernel of its own for a test that ends it; the model and its library are in the cache."""
    del warm_model
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, warm_model: Path) -> Iterator[Kernel]:
    """A kernel with the extension, shared by the tests of a module."""
    del warm_model
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    assert kernel.run("%load_ext mlc_nb").reply["status"] == "ok"
    yield kernel
    kernel.close()
