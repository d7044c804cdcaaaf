"""Progress bars: in a cell and on a terminal, with the time left, gone at the end, and silent where it is quick."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.notebook.conftest import Kernel

WORK = """
import time
from mlc_nb.progress import byte_bar, item_bar, working
with byte_bar("Loading", total=3000) as bar:
    for _ in range({times}):
        time.sleep(0.1)
        bar.update(60)
"""


def test_a_bar_in_a_cell(kernel: Kernel) -> None:
    run = kernel.run(WORK.format(times=40))
    assert run.reply["status"] == "ok", run.errors
    assert len(run.displays) == 1
    states = [content["data"] for content in run.of_type("display_data", "update_display_data")]
    times = [moment for moment, message in run.messages if "data" in message["content"]]
    assert all(later - earlier > 0.2 for earlier, later in pairwise(times[:-1]))
    for state in states[:-1]:
        assert re.fullmatch(r"Loading: +\d+%\|.*\| [\d.]+k/3\.00k \[00:0\d<00:0\d, [\d.]+B/s\]", state["text/plain"])
        assert "<progress value='" in state["text/html"]
    assert states[-1] == {"text/plain": ""}
    assert kernel.run(WORK.format(times=10)).displays == {}, "what is quick is silent"


def test_a_bar_of_unknown_length_and_one_that_is_stopped(kernel: Kernel) -> None:
    run = kernel.run(
        "with working('Compiling <b>') as tick:\n"
        "    for _ in range(25):\n        time.sleep(0.1); tick()\n    raise KeyError('x')"
    )
    assert run.errors[0]["ename"] == "KeyError"
    states = [content["data"] for content in run.of_type("display_data", "update_display_data")]
    assert states[0]["text/plain"] == "Compiling <b>: 00:02"
    assert "&lt;b&gt;" in states[0]["text/html"]
    assert states[-1] == {"text/plain": ""}


def test_bars_on_a_terminal_are_gone_at_the_end() -> None:
    code = WORK.format(times=25) + "print('done')\n"
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout == "done\n"
    assert "<00:0" in finished.stderr, "no time left"
    assert finished.stderr.splitlines()[-1].strip() == "", "a bar stayed"
    quick = subprocess.run([sys.executable, "-c", WORK.format(times=5)], capture_output=True, text=True, check=True)
    assert quick.stderr.strip() == ""
