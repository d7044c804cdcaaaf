"""Which engines run in other processes of this user: each process tells in a small file, and the dead are not believed.

A file counts as long as its writer holds a lock on it, which the system drops when the process ends or becomes another
program, however that happens, and as long as the process that it names is the one that started then. Whoever looks
removes files that do not count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from mlc_nb.weights.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Sequence

if sys.platform != "win32":
    import fcntl

__all__ = ["EngineOfProcess", "engines_of_all_processes", "publish", "state_folder"]

_MOST_BYTES = 1 << 20
_PARTIAL = ".partial"
_PARTIAL_SECONDS = 3600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOfProcess:
    """An engine of some process of this user on this machine, as that process last told.

    Attributes
    ----------
    pid
        The process.
    notebook
        Path of its notebook; None where it has none or the front end does not tell.
    model, scheme, device, state
        As in the rows of `mlc_nb.engines`.
    memory_bytes
        What it was given of the device's memory; None unless ready.
    process_bytes
        Private memory of the whole process, measured by whoever asks; None where the system does not tell.
    """

    pid: int
    notebook: str | None
    model: str
    scheme: str | None
    device: str
    state: str
    memory_bytes: int | None
    process_bytes: int | None = None


def state_folder() -> Path:
    """The folder of the files."""
    return cache_root() / "processes"


def publish(rows: Sequence[EngineOfProcess]) -> None:
    """Replace what this process has told of its engines; no rows take its file away.

    That a file cannot be written keeps no engine from running: then other processes do not see it.
    """
    _published.replace(rows)


def engines_of_all_processes() -> list[EngineOfProcess]:
    """Return the engines of every process of this user on this machine, by pid; those of this one included."""
    _remove_partial_files()
    rows = [row for path in state_folder().glob("*.json") for row in _read(path)]
    return sorted(rows, key=lambda row: (row.pid, row.model))


class _Published:
    """The file of this process, and the lock on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._path: Path | None = None

    def replace(self, rows: Sequence[EngineOfProcess]) -> None:
        with self._lock:
            try:
                if rows:
                    self._write(rows)
                else:
                    self._remove()
            except OSError as error:
                _log.info("Other kernels do not see the engines of this one: %s", error)

    def _write(self, rows: Sequence[EngineOfProcess]) -> None:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}-{uuid.uuid5(uuid.NAMESPACE_OID, repr(_here())).hex}.json"
        partial = folder / f"{uuid.uuid4().hex}{_PARTIAL}"
        file = partial.open("x", encoding="utf-8")
        try:
            json.dump({"process": _identity(os.getpid()), "engines": [asdict(row) for row in rows]}, file)
            file.flush()
            if sys.platform == "win32":
                file.close()
            else:
                fcntl.flock(file, fcntl.LOCK_EX)
            partial.replace(path)
        except BaseException:
            file.close()
            partial.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._path = file, path

    def _remove(self) -> None:
        if self._file is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = self._path = None

    def leave_to_parent(self) -> None:
        """In a forked child: close its copy, which would hold the lock after the parent's end."""
        if self._file is not None:
            self._file.close()


def _read(path: Path) -> list[EngineOfProcess]:
    """The rows of a file, which is removed where they are no longer, or never were, true."""
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
        try:
            content = json.loads(file.read(_MOST_BYTES))
            identity, rows = content["process"], [EngineOfProcess(**row) for row in content["engines"]]
            where, pid = identity["where"], int(identity["pid"])
        except (ValueError, LookupError, TypeError):  # not what this code writes
            path.unlink(missing_ok=True)
            return []
        if where != _here():
            return []  # of another machine or container, on a shared disk
        if identity == _identity(pid) and _is_locked(file):
            size = _private_bytes(pid)
            return [replace(row, process_bytes=size) for row in rows]
        path.unlink(missing_ok=True)
    return []


def _is_locked(file: IO[str]) -> bool:
    """Whether the writer of a file still holds its lock; True where there are no locks."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _here() -> dict[str, Any]:
    """What tells process ids of this machine and container from those of others."""
    try:
        processes = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        processes = 0
    return {"host": socket.gethostname(), "processes": processes}


def _identity(pid: int) -> dict[str, Any] | None:
    """A process as no other one is or will be; None where it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return {"where": _here(), "pid": pid, "started": _started(process)}
    except (psutil.Error, OSError, ValueError):
        return None


def _private_bytes(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return None


def _started(process: psutil.Process) -> float:
    """When a process started, by a clock that nobody sets where there is one."""
    if sys.platform == "linux":
        # Ticks since the machine started; the name before them may hold spaces and parentheses.
        return float(Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return process.create_time()


def _remove_partial_files() -> None:
    """What writers that were killed in mid-write have left; a write takes no minute."""
    for path in state_folder().glob(f"*{_PARTIAL}"):
        with contextlib.suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) > _PARTIAL_SECONDS:
                path.unlink(missing_ok=True)


_published: _Published = globals().get("_published") or _Published()  # see registry


def _renew() -> None:
    global _published
    _published.leave_to_parent()
    _published = _Published()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
