"""The same cells under the oldest ipykernel that we support and under the installed one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.notebook.conftest import Kernel, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.notebook.conftest import Run

OLDEST = "6.30"
GREEDY = "--temperature 0 --max-tokens 12"


@pytest.fixture(scope="module", params=["oldest", "installed"])
def versioned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, older_ipykernel: Path, warm_model: Path
) -> Iterator[Kernel]:
    """A kernel of each version, with the extension."""
    del warm_model
    kernel = Kernel(tmp_path_factory.mktemp(request.param), older_ipykernel if request.param == "oldest" else None)
    version = kernel.run("import ipykernel; print(ipykernel.__version__)").stream("stdout")
    assert version.startswith(f"{OLDEST}.") is (request.param == "oldest")
    assert kernel.run("%load_ext mlc_nb").reply["status"] == "ok"
    yield kernel
    assert kernel.complaints == ""
    kernel.close()


def test_cells_answer(versioned: Kernel) -> None:
    run = versioned.run(f"%%mlc_chat --new {GREEDY} -o reply\nWhat is the capital of France?")
    assert run.reply["status"] == "ok", run.errors
    assert "Paris" in run.text
    assert value_of(versioned, f"_ is reply and Out[{run.reply['execution_count']}] is reply")
    assert value_of(versioned, "reply.text") == run.text
    assert versioned.run(f"%%mlc_batch {GREEDY} -o answers\nHi\nSay hello.").reply["status"] == "ok"
    assert value_of(versioned, "len(answers.texts)") == 2
    run = versioned.run("%%mlc_compare --seed 1 --seed 2 --max-tokens 12\nSay hello.")
    assert run.reply["status"] == "ok", run.errors
    assert versioned.run("%mlc_status").reply["status"] == "ok"


def test_coroutines_are_awaited_in_the_loop_of_the_kernel(versioned: Kernel) -> None:
    run = versioned.run("import mlc_nb\n(await mlc_nb.batch(['Say hello.'] * 3, max_tokens=6, temperature=0)).texts")
    assert run.reply["status"] == "ok", run.errors
    assert run.of_type("execute_result")[0]["data"]["text/plain"].count("Hello") == 3


def test_interrupt_stops_the_answer_and_the_next_cell_works(versioned: Kernel) -> None:
    interrupted = False

    def interrupt(run: Run) -> None:
        nonlocal interrupted
        if not interrupted and len(run.text) > 30:
            interrupted = True
            versioned.manager.interrupt_kernel()

    run = versioned.run("%%mlc_chat --new --seed 1 --max-tokens 1500\nTell me a long story.", during=interrupt)
    assert run.errors[0]["ename"] == "KeyboardInterrupt"
    assert "stopped by you" in run.note
    assert versioned.run(f"%%mlc_chat {GREEDY}\nGo on.").reply["status"] == "ok"


def test_a_batch_in_the_background_shows_nothing_under_other_cells(versioned: Kernel) -> None:
    versioned.run("import asyncio, mlc_nb, time")
    versioned.run(
        "task = asyncio.ensure_future(mlc_nb.batch(['Tell me a story.'] * 16, max_tokens=60, seed=1))\n"
        "await asyncio.sleep(2.6)"
    )
    started = time.monotonic()
    others = []
    while not value_of(versioned, "task.done()"):
        others.append(versioned.run("await asyncio.sleep(0.3); print('mine')"))
        assert time.monotonic() - started < 60
    assert others, "the batch was over before another cell ran"
    for run in others:
        assert run.stream("stdout") == "mine\n"
        assert not run.of_type("display_data"), "a bar under another cell"
    assert value_of(versioned, "task.result().errors") == []
