"""Every way a kernel can end, times what it was doing: idle with a model, in mid-stream, in mid-compile.

Whatever the ending, the process and its children are gone within 5 s, with the exit code of that ending and without a
word on stderr; its state file counts no more, and the next kernel loads at once (which is how the next test begins).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient

from mlc_nb.presence import engines_of_all_processes, state_folder
from tests.notebook.conftest import Kernel
from tests.notebook.test_kernel_endings import gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS_TO_END = 5.0
SECONDS_TO_LOAD = 10.0  # a second is usual; a lock that a dead process held would take for ever
MEMORY_GROUP = Path("/sys/fs/cgroup/memory/mlc_nb-test")

LOAD = """
%load_ext mlc_nb
import os, sys, signal, threading
import mlc_nb
engine = mlc_nb.get_engine()
messages = [{"role": "user", "content": "Tell me a very long story about the sea."}]
def stream():
    for chunk in engine.chat.completions.create(messages=messages, stream=True, temperature=0.7, max_tokens=1800):
        yield chunk
"""
COMPILE = """
%load_ext mlc_nb
import os, sys, signal, threading
import mlc_nb
os.environ["MLC_NB_HOME"] = {home!r}
def compile():
    mlc_nb.get_engine({model!r})
"""
IN_BACKGROUND = """
def quietly():
    try:
        {work}
    except mlc_nb.MLCError:
        pass
threading.Thread(target=quietly, daemon=True).start()
"""


@dataclass(frozen=True)
class Ending:
    """How a kernel ends.

    Attributes
    ----------
    end
        Does it, to a kernel.
    code
        The exit code that it gives; None where nobody can ask.
    in_cell
        Whether a cell does it: then what the kernel is doing goes on in another thread.
    tidy
        Whether our own code runs before the end, so that even the state file goes.
    """

    end: Callable[[Kernel], None]
    code: int | None
    in_cell: bool = False
    tidy: bool = False


def cell(code: str) -> Callable[[Kernel], None]:
    return lambda kernel: kernel.client.execute(code)


def send(number: int) -> Callable[[Kernel], None]:
    return lambda kernel: kernel.process.send_signal(number)


def interrupt_and_exit(kernel: Kernel) -> None:
    kernel.manager.interrupt_kernel()
    # An interrupted cell takes the cells in line behind it along.
    while kernel.client.execute_interactive("pass", timeout=3, output_hook=lambda _: None)["content"]["status"] != "ok":
        pass
    kernel.client.execute("exit")


def restart(*, now: bool) -> Callable[[Kernel], None]:
    def end(kernel: Kernel) -> None:
        kernel.client.stop_channels()
        kernel.manager.restart_kernel(now=now)

    return end


def kill_server(kernel: Kernel) -> None:
    assert isinstance(kernel, ServedKernel)
    kernel.server.kill()
    kernel.server.wait()


def fill_memory(kernel: Kernel) -> None:
    """Have the system's own killer of those who take too much end the kernel."""
    (MEMORY_GROUP / "memory.limit_in_bytes").write_text(str(64 * 2**20))
    (MEMORY_GROUP / "cgroup.procs").write_text(str(kernel.process.pid))
    kernel.client.execute("import numpy\nhoard = [numpy.ones(2**20) for _ in range(1000)]")


ENDINGS = {
    "exit": Ending(cell("exit"), 0, in_cell=True, tidy=True),
    "os._exit": Ending(cell("os._exit(7)"), 7, in_cell=True),
    "execv": Ending(cell("os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(9)'])"), 9, in_cell=True),
    "interrupt": Ending(interrupt_and_exit, 0, tidy=True),
    "shutdown": Ending(lambda kernel: kernel.manager.shutdown_kernel(now=False), 0, tidy=True),
    "shutdown-now": Ending(lambda kernel: kernel.manager.shutdown_kernel(now=True), -signal.SIGKILL),
    "restart": Ending(restart(now=False), 0, tidy=True),
    "restart-now": Ending(restart(now=True), -signal.SIGKILL),
    "SIGTERM": Ending(send(signal.SIGTERM), -signal.SIGTERM, tidy=True),
    "SIGHUP": Ending(send(signal.SIGHUP), -signal.SIGHUP),
    "SIGKILL": Ending(send(signal.SIGKILL), -signal.SIGKILL),
    "SIGABRT": Ending(send(signal.SIGABRT), -signal.SIGABRT),
    "out-of-memory": Ending(fill_memory, -signal.SIGKILL, in_cell=True),
    "server-death": Ending(kill_server, None),
}

SERVER = """
import sys, time
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name="python3", transport="ipc", ip=sys.argv[1], connection_file=sys.argv[2])
manager.start_kernel(stderr=open(sys.argv[3], "w"), cwd=sys.argv[4])
print(manager.provisioner.pid, flush=True)
time.sleep(600)
"""


class ServedKernel(Kernel):
    """A kernel whose manager is another process."""

    def __init__(self, folder: Path) -> None:
        self.stderr_path = folder / "stderr"
        connection = folder / "connection.json"
        arguments = [str(folder / "ipc"), str(connection), str(self.stderr_path), str(folder)]
        environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython")}
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.server.stdout is not None
        self._process = psutil.Process(int(self.server.stdout.readline()))
        self.client = BlockingKernelClient(connection_file=str(connection))
        self.client.load_connection_file()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def complaints(self) -> str:
        # What ipykernel says itself as it follows its server.
        lines = super().complaints.splitlines()
        return "\n".join(line for line in lines if "Parent appears to have exited, shutting down." not in line)

    @property
    def process(self) -> psutil.Process:
        return self._process

    def close(self) -> None:
        self.client.stop_channels()
        self.server.kill()
        self.server.wait()
        assert self.server.stdout is not None
        self.server.stdout.close()


@pytest.fixture
def memory_group() -> Iterator[None]:
    try:
        MEMORY_GROUP.mkdir(exist_ok=True)
        (MEMORY_GROUP / "memory.limit_in_bytes").write_text(str(2**40))
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    yield
    with contextlib.suppress(OSError):
        MEMORY_GROUP.rmdir()


@pytest.fixture(scope="module")
def home_without_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own for kernels that compile: what each leaves behind, the next one meets."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def kernel_to_end(
    request: pytest.FixtureRequest, tmp_path: Path, warm_model: Path, ending_name: str
) -> Iterator[Kernel]:
    del warm_model
    if ending_name == "out-of-memory":
        request.getfixturevalue("memory_group")
    kernel = ServedKernel(tmp_path) if ending_name == "server-death" else Kernel(tmp_path)
    yield kernel
    kernel.close()


def make_idle(kernel: Kernel, ending: Ending) -> None:
    del ending
    assert kernel.run(LOAD + "next(stream()) and None").reply["status"] == "ok"


def make_stream(kernel: Kernel, ending: Ending) -> None:
    if ending.in_cell:
        code = LOAD + "words = stream()\nnext(words)\n" + IN_BACKGROUND.format(work="list(words)")
        assert kernel.run(code).reply["status"] == "ok"
        return
    kernel.client.execute(LOAD + "for chunk in stream(): print(end='.', flush=True)")
    wait_for(lambda: "stream" in message_types(kernel))


def make_compile(kernel: Kernel, ending: Ending, home: Path, model: Path) -> None:
    shutil.rmtree(home / "libraries", ignore_errors=True)  # in case one was finished
    code = COMPILE.format(home=str(home), model=str(model))
    code += IN_BACKGROUND.format(work="compile()") if ending.in_cell else "compile()"
    kernel.client.execute(code)
    wait_for(lambda: kernel.process.children())


def message_types(kernel: Kernel) -> set[str]:
    found = set()
    while kernel.client.iopub_channel.msg_ready():
        message: dict[str, Any] = kernel.client.get_iopub_msg(timeout=1)
        assert message["msg_type"] != "error", message["content"]
        found.add(message["msg_type"])
    return found


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_TO_LOAD
    while not happened():
        assert time.monotonic() < deadline, "the kernel took too long to load: did the one before it leave a lock?"
        time.sleep(0.02)


@pytest.mark.parametrize("state", ["idle", "stream", "compile"])
@pytest.mark.parametrize("ending_name", list(ENDINGS))
def test_nothing_is_left_of_a_kernel(
    kernel_to_end: Kernel,
    state: str,
    ending_name: str,
    smollm2_path: Path,
    home_without_libraries: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, ending = kernel_to_end, ENDINGS[ending_name]
    if ending_name == "SIGABRT":  # ipykernel's fault handler would write the stacks of all threads
        kernel.run("import faulthandler\nfaulthandler.disable()")
    if state == "compile":
        monkeypatch.setenv("MLC_NB_HOME", str(home_without_libraries))
        make_compile(kernel, ending, home_without_libraries, smollm2_path)
    elif state == "stream":
        make_stream(kernel, ending)
    else:
        make_idle(kernel, ending)
    old, popen = kernel.process, None if ending.code is None else kernel.manager.provisioner.process
    children = old.children(recursive=True)
    assert bool(children) == (state == "compile")
    assert old.pid in [row.pid for row in engines_of_all_processes()]

    started = time.monotonic()
    ending.end(kernel)
    assert gone([old, *children], SECONDS_TO_END - (time.monotonic() - started)), "still there"
    if popen is not None:
        assert popen.wait(1) == ending.code
    assert kernel.complaints == ""
    if ending.tidy:
        assert not list(state_folder().glob(f"{old.pid}-*"))
    assert old.pid not in [row.pid for row in engines_of_all_processes()]
    assert not list(state_folder().glob(f"{old.pid}-*"))
    if ending_name.startswith("restart"):
        kernel.connect()
        make_idle(kernel, ending)


@pytest.mark.parametrize("state", ["idle", "compile"])
def test_a_kernel_after_all_these_endings_loads_at_once(
    fresh_kernel: Kernel, state: str, smollm2_path: Path, home_without_libraries: Path
) -> None:
    started = time.monotonic()
    if state == "idle":
        make_idle(fresh_kernel, ENDINGS["exit"])
    else:
        make_compile(fresh_kernel, ENDINGS["exit"], home_without_libraries, smollm2_path)
    assert time.monotonic() - started < SECONDS_TO_LOAD
