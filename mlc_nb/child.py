"""Child processes that never outlive their parent: not on SIGKILL, not on a crash, not on a forgotten handle.

A child runs a Python module (``pip``, ``mlc_nb.compiler``). It leaves the terminal's process group, so Ctrl-C and
Kernel > Interrupt reach the parent only, and the parent decides what becomes of it.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["popen"]

_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)

# The working directory must not shadow modules of the child (a notebook may lie beside a file called random.py), so
# the empty entry of sys.path goes before anything is imported.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "sys.path.append(sys.argv[1]); from mlc_nb.child import _child_main; _child_main()"
)

_PR_SET_PDEATHSIG = 1


def popen(module: str, arguments: Sequence[str] = (), **options: Any) -> subprocess.Popen[Any]:
    """Start ``python -m module arguments`` in a child that dies with this process.

    Parameters
    ----------
    module
        Module to run as ``__main__``, with the interpreter of this process.
    arguments
        Its command line.
    **options
        Keyword arguments of `subprocess.Popen` (``stdout``, ``text``, ``env``, ``cwd`` ...).

    Returns
    -------
    subprocess.Popen
        The running child; any thread may wait for it or kill it.
    """
    command = [sys.executable, "-c", _BOOT, _PACKAGE_ROOT, str(os.getpid()), module, *arguments]
    if sys.platform == "win32":
        options.setdefault("creationflags", subprocess.CREATE_NEW_PROCESS_GROUP)
    else:
        options.setdefault("start_new_session", True)
    return _spawner.call(lambda: subprocess.Popen(command, **options))


class _Spawner:
    """One permanent thread that starts every child.

    Linux ties the parent-death signal to the thread that forked, not to its process: a child started by a
    short-lived thread would be killed when that thread ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def call(self, start: Callable[[], subprocess.Popen[Any]]) -> subprocess.Popen[Any]:
        """Run ``start`` on the permanent thread and return or raise what it does."""
        done = threading.Event()
        outcome: list[subprocess.Popen[Any] | BaseException] = []

        def order() -> None:
            try:
                outcome.append(start())
            except BaseException as error:
                outcome.append(error)
            done.set()

        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="mlc_nb-spawner", daemon=True)
                self._thread.start()
        self._orders.put(order)
        try:
            done.wait()
        except BaseException:  # Ctrl-C in mid-start: nobody would hold the child
            done.wait()
            if isinstance(outcome[0], subprocess.Popen):
                outcome[0].kill()
                outcome[0].wait()
            raise
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def _serve(self) -> None:
        while True:
            self._orders.get()()


_spawner: _Spawner = globals().get("_spawner") or _Spawner()  # see registry


def _renew_spawner() -> None:
    # A forked child has no thread but its own; it gets a spawner of its own when it first asks.
    global _spawner
    _spawner = _Spawner()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_spawner)


def _child_main() -> None:
    """Run inside the child: tie it to its parent, then become the wanted module."""
    import runpy

    _, _, parent, module, *arguments = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _follow(parent: int) -> None:
    """Make this process end when ``parent`` does, however the parent ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was ordered
            os._exit(1)
    else:
        threading.Thread(target=_exit_after, args=(parent,), name="mlc_nb-parent-watch", daemon=True).start()


def _exit_after(parent: int) -> None:
    import psutil

    try:
        psutil.Process(parent).wait()
    except psutil.NoSuchProcess:
        pass
    finally:
        os._exit(1)
