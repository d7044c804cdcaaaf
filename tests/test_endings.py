"""Scripts that end with the real engine in full swing: their own exit code, within 2 s, nothing left, nothing said."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from pathlib import Path

# Stops in the middle of a stream; a second request is in its prefill.
STREAMING = """
import os, signal, sys, threading, time
from mlc_nb import MLCEngine
engine = MLCEngine()
story = [{"role": "user", "content": "Tell me a very long story."}]
stream = engine.chat.completions.create(messages=story, stream=True, temperature=0.7, max_tokens=1800)
for _ in range(5):
    next(stream)
long_prompt = [{"role": "user", "content": "word " * 1800}]
second = engine.chat.completions.create(messages=long_prompt, stream=True)
print("ready", flush=True)
"""


def end(body: str, *, send: int | None = None, prologue: str = STREAMING) -> tuple[int, str, float]:
    """Exit code, stderr and the seconds from ``ready`` to the end; no child process may be left."""
    script = prologue + textwrap.dedent(body)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        started = time.monotonic()
        children = psutil.Process(process.pid).children(recursive=True)
        if send is not None:
            time.sleep(0.1)
            process.send_signal(send)
        errors = re.sub(r"\r[^\n]*\n?", "", process.stderr.read())  # without the bars that a busy machine shows
        code = process.wait(timeout=20)
        seconds = time.monotonic() - started
    psutil.wait_procs(children, timeout=3)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return code, errors, seconds


@pytest.mark.parametrize(
    ("body", "send", "code", "last_error_line"),
    [
        ("", None, 0, ""),
        ("sys.exit(3)", None, 3, ""),
        ("raise ValueError('mine')", None, 1, "ValueError: mine"),
        ("for _ in stream: pass", signal.SIGTERM, -signal.SIGTERM, ""),
        ("time.sleep(60)", signal.SIGTERM, -signal.SIGTERM, ""),
        ("for _ in stream: pass", signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        ("for _ in stream: pass", signal.SIGKILL, -signal.SIGKILL, ""),
        ("threading.Thread(target=list, args=(stream,), daemon=True).start(); sys.exit(3)", None, 3, ""),
        ("engine.terminate(); engine.terminate(); sys.exit(3)", None, 3, ""),
        ("del engine, stream, second; sys.exit(3)", None, 3, ""),
    ],
)
def test_a_script_that_forgets_to_terminate_ends_by_itself(
    warm_model: Path, body: str, send: int | None, code: int, last_error_line: str
) -> None:
    del warm_model
    exit_code, errors, seconds = end(body, send=send)
    assert exit_code == code
    assert (errors.strip().splitlines() or [""])[-1] == last_error_line
    assert seconds < 2.0


def test_threads_that_python_waits_for_get_the_end_of_their_streams(warm_model: Path) -> None:
    del warm_model
    body = """
    def read():
        try:
            list(stream)
        except mlc_nb.RequestAborted:
            print("aborted", file=sys.stderr)
    import mlc_nb
    threading.Thread(target=read).start()
    sys.exit(3)
    """
    code, errors, seconds = end(body)
    assert (code, errors) == (3, "aborted\n")
    assert seconds < 2.0


LOADING = """
import sys, threading, time
import mlc_nb
def load():
    try:
        mlc_nb.MLCEngine()
    except mlc_nb.EngineTerminatedError:
        pass
threading.Thread(target=load, daemon=True).start()
while not mlc_nb.engines():
    time.sleep(0.001)
print("ready", flush=True)
"""

# An empty folder of libraries: the compiler's child process is at work when the end comes.
COMPILING = """
import os, psutil, tempfile
from pathlib import Path
from mlc_nb.weights.source import resolve_model
model = resolve_model("smollm2", progress=False).path
folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
os.environ["MLC_NB_HOME"] = folder.name
import sys, threading, time
import mlc_nb
threading.Thread(target=mlc_nb.MLCEngine, args=(model,), daemon=True).start()
while not psutil.Process().children():
    time.sleep(0.01)
time.sleep(0.5)
print("ready", flush=True)
"""


@pytest.mark.parametrize("prologue", [LOADING, COMPILING], ids=["loading", "compiling"])
@pytest.mark.parametrize(
    ("body", "send", "code"),
    [("sys.exit(3)", None, 3), ("time.sleep(60)", signal.SIGTERM, -signal.SIGTERM)],
    ids=["exit", "sigterm"],
)
def test_an_end_while_a_model_is_made_ready(
    warm_model: Path, prologue: str, body: str, send: int | None, code: int
) -> None:
    del warm_model
    exit_code, errors, seconds = end(body, send=send, prologue=prologue)
    assert (exit_code, errors) == (code, "")
    assert seconds < 2.0
