"""Every ending of a process leads to terminate, keeps its exit code and is over within 2 s."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

PROLOGUE = """
import os, signal, sys, threading, time
from mlc_nb import lifecycle
def terminate(seconds):
    print("terminated", flush=True)
lifecycle.at_end(terminate)
lifecycle.at_end(terminate)
"""


def run_script(body: str, *, send: int | None = None) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and the seconds between ``ready`` and the end of a script."""
    script = PROLOGUE + textwrap.dedent(body)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        started = time.monotonic()
        if send is not None:
            process.send_signal(send)
        output, errors = process.stdout.read(), process.stderr.read()
        return process.wait(timeout=20), output, errors, time.monotonic() - started


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("print('ready', flush=True)", 0),
        ("print('ready', flush=True); sys.exit(3)", 3),
        ("print('ready', flush=True); raise SystemExit('no')", 1),
    ],
)
def test_exit_terminates_once_and_keeps_the_code(body: str, code: int) -> None:
    returncode, output, errors, seconds = run_script(body)
    assert (returncode, output) == (code, "terminated\n")
    assert errors in ("", "no\n")
    assert seconds < 2


def test_terminate_comes_before_python_waits_for_threads() -> None:
    body = """
    import concurrent.futures
    ended = threading.Event()
    lifecycle.at_end(lambda seconds: ended.set())
    threading.Thread(target=ended.wait, args=(15,)).start()
    concurrent.futures.ThreadPoolExecutor().submit(ended.wait, 15)
    print('ready', flush=True)
    sys.exit(3)
    """
    returncode, output, errors, seconds = run_script(body)
    assert (returncode, output, errors) == (3, "terminated\n", "")
    assert seconds < 2


def test_sigterm_terminates_and_still_kills() -> None:
    returncode, output, errors, seconds = run_script("print('ready', flush=True); time.sleep(30)", send=signal.SIGTERM)
    assert (returncode, output, errors) == (-signal.SIGTERM, "terminated\n", "")
    assert seconds < 2


def test_the_previous_sigterm_handler_still_decides() -> None:
    body = """
    lifecycle._before = None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    lifecycle.at_end(terminate)
    print('ready', flush=True)
    time.sleep(30)
    """
    returncode, output, errors, _ = run_script(body, send=signal.SIGTERM)
    assert (returncode, output.splitlines()[0], errors) == (7, "terminated", "")


def test_an_ignored_sigterm_stays_ignored() -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lifecycle._before = None
    lifecycle.at_end(terminate)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    print('ready', flush=True)
    """
    assert run_script(body)[0] == 0


def test_a_terminate_that_hangs_or_fails_delays_the_end_by_the_grace_only() -> None:
    body = """
    def fail(seconds):
        raise RuntimeError("no")
    lifecycle.at_end(fail)
    lifecycle.at_end(lambda seconds: time.sleep(60))
    print('ready', flush=True)
    sys.exit(3)
    """
    returncode, _, errors, seconds = run_script(body)
    assert (returncode, errors) == (3, "")
    assert seconds < 2


def test_sigterm_does_not_wait_for_a_lock_that_the_main_thread_holds() -> None:
    body = """
    lock = threading.Lock()
    def locked(seconds):
        with lock:
            pass
    lifecycle.at_end(locked)
    with lock:
        print('ready', flush=True)
        time.sleep(30)
    """
    returncode, _, errors, seconds = run_script(body, send=signal.SIGTERM)
    assert (returncode, errors) == (-signal.SIGTERM, "")
    assert seconds < 2


def test_a_forked_child_terminates_nothing() -> None:
    body = """
    child = os.fork()
    if not child:
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"!")  # CPython drops signals that arrive in mid-fork
        time.sleep(30)
        os._exit(1)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    print('ready', flush=True)
    """
    if sys.version_info >= (3, 12):
        body = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n" + textwrap.dedent(body)
    assert run_script(body)[:3] == (0, "terminated\n", "")


def test_installing_from_another_thread_is_completed_by_the_main_thread() -> None:
    script = textwrap.dedent(
        """
        import signal, threading
        from mlc_nb import lifecycle
        terminate = lambda seconds: None
        thread = threading.Thread(target=lifecycle.at_end, args=(terminate,))
        thread.start(); thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        lifecycle.at_end(terminate)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20, env=dict(os.environ))
