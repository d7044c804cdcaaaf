"""A kernel that is shut down, restarted or killed in the middle of an answer leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.notebook.conftest import Kernel

STORY = "%%mlc_chat --new --temperature 0.7 --seed 3 --max-tokens 1500\nTell me a long story about a lighthouse keeper."
QUESTION = "%%mlc_chat --temperature 0 --max-tokens 30\nWhat is the capital of France? Answer in one sentence."


def stream(kernel: Kernel) -> None:
    """Leave the kernel in the middle of an answer."""
    kernel.run("%load_ext mlc_nb")
    kernel.start(STORY)


def background(kernel: Kernel) -> None:
    """Leave the kernel idle, with an answer that nobody reads in full swing."""
    kernel.run(
        "from mlc_nb import MLCEngine\nengine = MLCEngine()\n"
        "story = [{'role': 'user', 'content': 'Tell me a long story.'}]\n"
        "stream = engine.chat.completions.create(messages=story, stream=True, max_tokens=1800)\nnext(stream)\n"
    )


def idle(kernel: Kernel) -> None:
    """Leave the kernel idle with a loaded model."""
    kernel.run("%load_ext mlc_nb")
    kernel.run(QUESTION)


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def shutdown(kernel: Kernel) -> None:
    kernel.manager.shutdown_kernel(now=False)


def shutdown_now(kernel: Kernel) -> None:
    kernel.manager.shutdown_kernel(now=True)


def terminate(kernel: Kernel) -> None:
    kernel.process.send_signal(signal.SIGTERM)


def leave(kernel: Kernel) -> None:
    kernel.manager.interrupt_kernel()
    time.sleep(0.8)  # an interrupted cell takes the cells in line behind it along
    kernel.client.execute("exit")


@pytest.mark.parametrize("state", [stream, background, idle])
@pytest.mark.parametrize(("end", "seconds"), [(shutdown, 2.5), (shutdown_now, 1.0), (terminate, 2.0), (leave, 3.0)])
def test_every_ending_is_quick_silent_and_whole(
    fresh_kernel: Kernel, state: Callable[[Kernel], None], end: Callable[[Kernel], None], seconds: float
) -> None:
    state(fresh_kernel)
    processes = [fresh_kernel.process, *fresh_kernel.process.children(recursive=True)]
    started = time.monotonic()
    end(fresh_kernel)
    assert gone(processes, seconds - (time.monotonic() - started)), f"still there after {seconds} s"
    assert fresh_kernel.complaints == ""


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("state", [stream, idle])
def test_restart_gives_a_kernel_that_answers(fresh_kernel: Kernel, state: Callable[[Kernel], None], now: bool) -> None:
    state(fresh_kernel)
    old = fresh_kernel.process
    fresh_kernel.client.stop_channels()
    started = time.monotonic()
    fresh_kernel.manager.restart_kernel(now=now)
    assert gone([old], 0.5)
    assert time.monotonic() - started < 4
    fresh_kernel.connect()
    fresh_kernel.run("%load_ext mlc_nb")
    run = fresh_kernel.run(QUESTION)
    assert run.reply["status"] == "ok", run.errors
    assert "Paris" in run.answer
    assert fresh_kernel.complaints == ""


def test_the_shutdown_hook_terminates_engines_before_the_kernel_goes(fresh_kernel: Kernel) -> None:
    idle(fresh_kernel)
    run = fresh_kernel.run(
        "import inspect, mlc_nb\nreply = get_ipython().kernel.do_shutdown(False)\n"
        "if inspect.isawaitable(reply): reply = await reply\n"
        "get_ipython().exit_now = False\nprint(reply['status'], mlc_nb.engines())"
    )
    assert run.stream("stdout") == "ok []\n"
    fresh_kernel.run("%unload_ext mlc_nb")
    run = fresh_kernel.run(
        "import mlc_nb\nengine = mlc_nb.get_engine()\nreply = get_ipython().kernel.do_shutdown(False)\n"
        "if inspect.isawaitable(reply): reply = await reply\n"
        "get_ipython().exit_now = False\nprint(len(mlc_nb.engines()))"
    )
    assert run.stream("stdout") == "1\n"


def test_a_killed_server_takes_the_kernel_s_children_along(fresh_kernel: Kernel) -> None:
    fresh_kernel.run(
        "import subprocess\nfrom mlc_nb import child\n"
        "process = child.popen('http.server', ['0'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    )
    children = fresh_kernel.process.children(recursive=True)
    assert children
    os.kill(fresh_kernel.process.pid, signal.SIGKILL)
    assert gone(children, 5)
