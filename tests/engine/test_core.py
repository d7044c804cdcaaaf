from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mlc_nb.engine.core import EngineCore
from mlc_nb.engine.generation import GenerationRequest
from mlc_nb.errors import BadRequestError, EngineTerminatedError, MLCError, OutOfMemoryError, RequestAborted
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.sampler import SamplingState
from tests.engine.scripted import VOCAB_SIZE, ScriptedRunner, make_model, mixed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlc_nb.engine.stream import StreamDelta
    from tests.engine.conftest import MakeCore


def make_request(name: str, prompt: list[int], max_tokens: int | None = 20, **sampling: float) -> GenerationRequest:
    options: dict[str, float] = {"temperature": 0.0, **sampling}
    return GenerationRequest(name, tuple(prompt), SamplingState(**options), max_tokens)  # type: ignore[arg-type]


def ids_of(deltas: list[StreamDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def expected_ids(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(mixed(history))
    return history[len(prompt) :]


def test_one_request(make_core: MakeCore) -> None:
    core = make_core()
    deltas = list(core.submit(make_request("one", [5, 6, 7])))
    assert ids_of(deltas) == expected_ids([5, 6, 7], 20)
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 20, 23)
    assert usage.extra is not None
    assert 0 < usage.extra["ttft_s"] <= usage.extra["end_to_end_latency_s"]
    metrics = core.metrics()
    assert (metrics.prefill_tokens, metrics.decode_tokens, metrics.finished_requests) == (3, 19, 1)
    assert metrics.free_pages == metrics.total_pages


@pytest.mark.parametrize(("num_pages", "chunk"), [(64, 2048), (64, 5), (9, 2048)])
def test_requests_together_get_what_they_get_alone(make_core: MakeCore, num_pages: int, chunk: int) -> None:
    config: dict[str, object] = {"max_num_sequence": 6, "prefill_chunk_size": chunk}
    core = make_core(mixed, config, num_pages=num_pages)
    source = random.Random(1)
    prompts = [[source.randrange(3, VOCAB_SIZE) for _ in range(source.randrange(1, 60))] for _ in range(12)]
    streams = [
        core.submit(make_request(str(i), prompt, 40, temperature=1.0, seed=i)) for i, prompt in enumerate(prompts)
    ]
    together = [ids_of(list(stream)) for stream in streams]
    for i, prompt in enumerate(prompts):
        alone = ids_of(list(core.submit(make_request("alone", prompt, 40, temperature=1.0, seed=i))))
        assert together[i] == alone
    metrics = core.metrics()
    assert metrics.free_pages == metrics.total_pages == num_pages
    assert (metrics.preemptions > 0) == (num_pages == 9)


def test_a_long_prompt_does_not_stall_running_answers(make_core: MakeCore) -> None:
    runners: list[ScriptedRunner] = []
    core = make_core(mixed, runners=runners, context=4096, num_pages=300)
    running = core.submit(make_request("running", [3], 3000))
    next(running)
    core.submit(make_request("long", list(range(3, 250)) * 8, 1))
    for _ in range(400):
        next(running)
    assert all(len(step) > 1 for step in runners[0].steps if max(step) > 1 and step is not runners[0].steps[0])


def test_requests_wait_in_line_first_come_first_served(make_core: MakeCore) -> None:
    order: list[int] = []

    def next_token(history: list[int]) -> int:
        if len(history) == 1:
            order.append(history[0])
        return mixed(history)

    core = make_core(next_token, {"mode": "interactive"}, step_seconds=0.001)
    streams = [core.submit(make_request(str(i), [3 + i], 5)) for i in range(5)]
    for stream in reversed(streams):
        list(stream)
    assert order == [3, 4, 5, 6, 7]


def test_short_requests_that_keep_coming_starve_nobody(make_core: MakeCore) -> None:
    core = make_core(mixed, {"max_num_sequence": 3}, num_pages=12, step_seconds=0.001)
    short = [core.submit(make_request(f"before {i}", [3 + i] * 20, 30)) for i in range(3)]
    large = core.submit(make_request("large", list(range(3, 150)), 20))
    short += [core.submit(make_request(f"after {i}", [50 + i] * 20, 30)) for i in range(20)]
    assert len(ids_of(list(large))) == 20
    assert core.metrics().waiting_requests > 10, "it needs most of the pool, and was not passed over for the small ones"
    for stream in short:
        list(stream)


def test_a_prompt_without_room_is_refused_with_both_numbers(make_core: MakeCore) -> None:
    core = make_core(context=32)
    with pytest.raises(BadRequestError, match=r"32 tokens.*at most 32"):
        core.submit(make_request("long", [3] * 32))
    assert len(ids_of(list(core.submit(make_request("fits", [3] * 30, None))))) == 2
    small = make_core(context=512, num_pages=2)
    assert small.max_sequence_length == 32
    assert make_core(mixed, {"max_single_sequence_length": 20}).max_sequence_length == 20


def test_a_duplicate_id_is_refused_and_free_again_afterwards(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.01)
    stream = core.submit(make_request("same", [3]))
    with pytest.raises(BadRequestError, match="'same' is in flight"):
        core.submit(make_request("same", [4]))
    list(stream)
    list(core.submit(make_request("same", [4])))


def test_abort_reaches_the_reader_and_frees_the_pages(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.005)
    stream = core.submit(make_request("long", [3], None))
    next(stream)
    core.abort("long")
    core.abort("unknown")
    with pytest.raises(RequestAborted, match="long"):
        list(stream)
    metrics = core.metrics()
    assert (metrics.free_pages, metrics.aborted_requests) == (metrics.total_pages, 1)
    assert list(stream) == []


@pytest.mark.parametrize("leave", ["drop", "close", "break"])
def test_leaving_a_stream_aborts_it_within_a_step(make_core: MakeCore, leave: str) -> None:
    core = make_core(step_seconds=0.01)
    stream = core.submit(make_request("left", [3], None))
    if leave == "break":
        for _ in stream:
            break
    next(stream)
    if leave == "close":
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    wait_for(lambda: core.metrics().free_pages == core.metrics().total_pages, 0.5)
    assert len(ids_of(list(core.submit(make_request("next", [3]))))) == 20


def test_an_interrupt_lands_and_aborts(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.01)
    stream = core.submit(make_request("interrupted", [3], None))

    def interrupt() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    del stream
    wait_for(lambda: core.metrics().free_pages == core.metrics().total_pages, 0.5)


def test_a_request_that_fails_fails_alone(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.005)
    good = core.submit(make_request("good", [3], 30))
    bad = core.submit(replace(make_request("bad", [4], 30), stop_token_ids=None))  # type: ignore[arg-type]
    with pytest.raises(MLCError, match="bad failed: TypeError") as failure:
        list(bad)
    assert isinstance(failure.value.__cause__, TypeError)
    assert len(ids_of(list(good))) == 30
    assert (core.state, core.metrics().failed_requests) == ("ready", 1)


def test_a_failing_step_fails_everything_in_flight_with_its_cause(make_core: MakeCore) -> None:
    def broken(history: list[int]) -> int:
        if len(history) > 6:
            raise ZeroDivisionError("the step broke")
        return 3

    runners: list[ScriptedRunner] = []
    core = make_core(broken, runners=runners, step_seconds=0.05)
    streams = [core.submit(make_request(str(i), [3, 3])) for i in range(3)]
    for stream in streams:
        with pytest.raises(EngineTerminatedError, match="the step broke") as failure:
            list(stream)
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
    wait_for(lambda: runners[0].closed)
    assert core.state == "failed"
    with pytest.raises(EngineTerminatedError, match="failed: ZeroDivisionError: the step broke"):
        core.submit(make_request("late", [3]))
    core.terminate()
    assert core.state == "failed"


def test_a_runner_that_does_not_open_raises_once_from_the_constructor() -> None:
    def open_runner() -> ScriptedRunner:
        raise OutOfMemoryError("wanted 3 GB, found 1 GB")

    before = threading.active_count()
    with pytest.raises(OutOfMemoryError, match="wanted 3 GB"):
        EngineCore(replace(make_model(), open_runner=open_runner), EngineConfig())
    wait_for(lambda: threading.active_count() == before)


def test_terminate_is_quick_idempotent_and_aborts(make_core: MakeCore) -> None:
    runners: list[ScriptedRunner] = []
    core = make_core(runners=runners, step_seconds=0.01)
    stream = core.submit(make_request("running", [3], None))
    next(stream)
    start = time.monotonic()
    core.terminate()
    assert time.monotonic() - start < 1
    core.terminate()
    assert (core.state, runners[0].closed, core._thread.is_alive()) == ("terminated", True, False)
    with pytest.raises(RequestAborted):
        list(stream)
    for call in (core.metrics, core.reset, lambda: core.model, lambda: core.submit(make_request("late", [3]))):
        with pytest.raises(EngineTerminatedError, match="terminated"):
            call()
    core.abort("running")


def test_terminate_gives_up_on_a_native_call_after_two_seconds(make_core: MakeCore) -> None:
    core = make_core(step_seconds=3.0)
    stream = core.submit(make_request("stuck", [3]))
    time.sleep(0.1)
    start = time.monotonic()
    core.terminate()
    assert time.monotonic() - start < 2.3
    with pytest.raises(RequestAborted):
        list(stream)
    core._thread.join(5)


def test_reset_aborts_and_zeroes(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.005)
    stream = core.submit(make_request("running", [3], None))
    next(stream)
    core.reset()
    with pytest.raises(RequestAborted):
        list(stream)
    metrics = core.metrics()
    assert (metrics.steps, metrics.aborted_requests, metrics.running_requests) == (0, 0, 0)


def test_threads_that_submit_abort_and_leave_at_random(make_core: MakeCore) -> None:
    core = make_core(mixed, {"max_num_sequence": 5}, num_pages=12)
    problems: list[BaseException] = []

    def work(worker: int) -> None:
        source = random.Random(worker)
        try:
            for round_ in range(12):
                name = f"{worker}-{round_}"
                prompt = [3 + source.randrange(50) for _ in range(source.randrange(1, 70))]
                stream = core.submit(make_request(name, prompt, source.randrange(1, 60)))
                fate = source.choice(["read", "read", "abort", "close", "drop"])
                if fate == "read":
                    ids = ids_of(list(stream))
                    assert ids == expected_ids(prompt, len(ids))
                elif fate == "abort":
                    core.abort(name)
                    with contextlib.suppress(RequestAborted):
                        list(stream)
                elif fate == "close":
                    next(stream)
                    stream.close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    wait_for(lambda: core.metrics().running_requests + core.metrics().waiting_requests == 0)
    assert core.metrics().free_pages == 12


def test_terminate_from_many_threads_at_once(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.01)
    streams = [core.submit(make_request(str(i), [3], None)) for i in range(4)]
    threads = [threading.Thread(target=core.terminate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for stream in streams:
        with pytest.raises(RequestAborted):
            list(stream)
    for thread in threads:
        thread.join(3)
        assert not thread.is_alive()


FORGETFUL = """
import sys, threading
from tests.engine.scripted import make_model
from tests.engine.test_core import make_request
from mlc_nb.engine.core import EngineCore
from mlc_nb.protocol.engine_config import EngineConfig
core = EngineCore(make_model(step_seconds=0.05), EngineConfig())
stream = core.submit(make_request("running", [3], None))
next(stream)
sys.exit(7)
"""


def test_a_script_that_forgets_to_terminate_ends_with_its_own_code() -> None:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert time.monotonic() - start < 20


FORKED = """
import os
from tests.engine.scripted import make_model
from tests.engine.test_core import make_request
from mlc_nb.engine.core import EngineCore
from mlc_nb.errors import EngineTerminatedError
from mlc_nb.protocol.engine_config import EngineConfig
core = EngineCore(make_model(), EngineConfig())
child = os.fork()
if child == 0:
    try:
        core.submit(make_request("child", [3]))
    except EngineTerminatedError as error:
        core.terminate()
        os._exit(9 if "fork" in str(error) else 8)
_, status = os.waitpid(child, 0)
assert len(list(core.submit(make_request("parent", [3])))) > 0
core.terminate()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_is_told_that_the_engine_lives_in_its_parent() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=60, check=False)
    assert done.returncode == 9
