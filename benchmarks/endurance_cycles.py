"""Loads, switches and interrupts by the hundred: memory comes back, and no interrupt wedges anything.

python -m benchmarks.endurance_cycles loads --count 200
python -m benchmarks.endurance_cycles switches --count 50
python -m benchmarks.endurance_cycles interrupts --count 1000

The tests run the same code at a twentieth of these counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import mlc_nb
from benchmarks.machine import write_result
from mlc_nb import MLCEngine
from mlc_nb.engine.generation import ActiveChoice
from mlc_nb.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["interrupts", "loads", "main", "switches"]

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
STORY = [{"role": "user", "content": "Tell me a story about a lighthouse keeper who counts the waves. " * 3}]
PHASES = ("before prefill", "prefill", "decode", "detokenize", "display", "any moment")
SETTLED = 10
"""The cycle that later ones are compared with: by then every cache of the process is as full as it gets."""


def loads(count: int) -> dict[str, Any]:
    """Load, ask and unload so many times; the curve of resident memory after each unload."""
    started = time.monotonic()
    curve, answers = [], set()
    for _ in range(count):
        engine = MLCEngine(MODEL)
        answers.add(ask(engine))
        engine.terminate()
        del engine
        curve.append(resident_megabytes())
    return curve_report(curve, started) | {
        "cycles": count,
        "answers": sorted(answers),
        "threads_left": engine_threads(),
        "ok": len(answers) == 1 and not engine_threads() and growth(curve) < 0.02,
    }


def switches(count: int) -> dict[str, Any]:
    """Ask two models in turns, of which only one fits under the memory limit: the other has to go each time.

    The second model is a file of its own with kernels of its own (float32 activations).
    """
    started = time.monotonic()
    curve, answers = [], (set[str](), set[str]())
    evictions = Evictions()
    with tempfile.TemporaryDirectory() as folder, evictions.counted():
        second = Path(folder) / "second.gguf"
        shutil.copyfile(resolve_model(MODEL, progress=False).path, second)
        mlc_nb.configure_memory(memory_limit="400 MiB")
        try:
            for _ in range(count):
                answers[0].add(ask(MLCEngine(MODEL)))
                answers[1].add(ask(MLCEngine(second, engine_config={"activation_dtype": "float32"})))
                assert len(mlc_nb.engines()) == 1
                curve.append(resident_megabytes())
        finally:
            mlc_nb.unload(all=True)
            mlc_nb.configure_memory(memory_limit=None)
    return curve_report(curve, started) | {
        "switches": count,
        "answers": [sorted(texts) for texts in answers],
        "evictions": evictions.count,
        "threads_left": engine_threads(),
        "ok": all(len(texts) == 1 for texts in answers)
        and evictions.count == 2 * count - 1
        and not engine_threads()
        and growth(curve) < 0.02,
    }


def interrupts(count: int, seed: int = 0) -> dict[str, Any]:
    """Interrupt so many streams, at a random place of each phase; a correct answer must follow each time."""
    started = time.monotonic()
    source = random.Random(seed)
    fates: Counter[str] = Counter()
    slowest, wrong = 0.0, []
    with MLCEngine(MODEL) as engine, Trigger.installed(engine) as trigger:
        expected = ask(engine)
        for number in range(count):
            phase = PHASES[number % len(PHASES)]
            was_stopped = interrupted(engine, trigger, phase, source)
            fates[f"{phase}: {'stopped' if was_stopped else 'finished'}"] += 1
            asked = time.monotonic()
            answer = ask(engine)
            slowest = max(slowest, time.monotonic() - asked)
            if answer != expected:
                wrong.append({"number": number, "phase": phase, "answer": answer})
        metrics = engine.metrics()
        held = metrics.running_requests + metrics.waiting_requests
    return {
        "interrupts": count,
        "seconds": round(time.monotonic() - started, 1),
        "fates": dict(sorted(fates.items())),
        "expected_answer": expected,
        "wrong_answers": wrong,
        "slowest_answer_after_s": round(slowest, 2),
        "requests_left": held,
        "threads_left": engine_threads(),
        "ok": not wrong and not held and not engine_threads() and slowest < 10,
    }


def interrupted(engine: MLCEngine, trigger: Trigger, phase: str, source: random.Random) -> bool:
    """Stream an answer that is interrupted in a phase; whether the interrupt reached it."""
    text = io.StringIO()
    trigger.arm(phase, source)
    try:
        trigger.reached("before prefill")
        # A seed of its own and a prompt that begins anew: the prefix cache must not have it all.
        messages = [{"role": "user", "content": f"{source.random()} {STORY[0]['content']}"}]
        for chunk in engine.chat.completions.create(messages=messages, stream=True, max_tokens=12):
            trigger.reached("display")
            print(chunk.choices[0].delta.content if chunk.choices else "", end="", file=text)
        trigger.wait()
    except KeyboardInterrupt:
        return True
    finally:
        trigger.disarm()
    return False


class Trigger:
    """Sends this process SIGINT a moment after a phase was reached for the n-th time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = ""
        self._times_left = 0
        self._delay = 0.0
        self._timer: threading.Timer | None = None

    @classmethod
    @contextlib.contextmanager
    def installed(cls, engine: MLCEngine) -> Iterator[Trigger]:
        """A trigger that hears of prefills, decodes and detokenizing; these go on as before when the block ends."""
        trigger = cls()
        runner: Any = engine.core._loop._runner
        step, take = runner.step, ActiveChoice.take

        def heard_step(slices: Any, *others: Any) -> Any:
            trigger.reached("prefill" if any(len(part.token_ids) > 1 for part in slices) else "decode")
            return step(slices, *others)

        def heard_take(choice: ActiveChoice, token: Any) -> Any:
            trigger.reached("detokenize")
            return take(choice, token)

        runner.step = heard_step
        ActiveChoice.take = heard_take  # type: ignore[method-assign, assignment]
        try:
            yield trigger
        finally:
            ActiveChoice.take = take  # type: ignore[method-assign]
            if hasattr(runner, "step"):
                del runner.step

    def arm(self, phase: str, source: random.Random) -> None:
        """Choose where the next interrupt comes."""
        with self._lock:
            self._phase = "before prefill" if phase == "any moment" else phase
            self._times_left = 1 if phase in ("before prefill", "prefill", "any moment") else source.randrange(1, 8)
            self._delay = source.uniform(0, 0.25 if phase == "any moment" else 0.004)

    def reached(self, phase: str) -> None:
        """Count a phase, on whatever thread it is reached."""
        with self._lock:
            if phase != self._phase:
                return
            self._times_left -= 1
            if self._times_left == 0:
                self._timer = threading.Timer(self._delay, os.kill, (os.getpid(), signal.SIGINT))
                self._timer.start()

    def wait(self) -> None:
        """Let an interrupt that is on its way arrive."""
        if self._timer is not None:
            self._timer.join()
            time.sleep(0.001)

    def disarm(self) -> None:
        """Hear of nothing any more; an interrupt that is still on its way is taken here."""
        self._phase = ""
        with contextlib.suppress(KeyboardInterrupt):
            self.wait()
        self._timer = None


class Evictions(logging.Handler):
    """Counts what the registry announces."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += "to make room for" in record.getMessage()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count, and keep silent, until the block ends."""
        logger = logging.getLogger("mlc_nb.admission")
        logger.addHandler(self)
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = True
            logger.removeHandler(self)


def ask(engine: MLCEngine) -> str:
    """A short greedy answer, always the same."""
    reply = engine.chat.completions.create(messages=QUESTION, max_tokens=10, temperature=0)
    return str(reply.choices[0].message.content)


def resident_megabytes() -> float:
    gc.collect()
    return round(float(psutil.Process().memory_info().rss) / 1e6, 2)


def growth(curve: list[float]) -> float:
    """Growth from the settled cycle to the last one, as a share."""
    return curve[-1] / curve[min(SETTLED, len(curve)) - 1] - 1


def curve_report(curve: list[float], started: float) -> dict[str, Any]:
    return {
        "seconds": round(time.monotonic() - started, 1),
        "resident_megabytes": curve,
        "growth_from_cycle_10": round(growth(curve), 4),
    }


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mlc_nb engine")]


WHAT: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "loads": (loads, 200),
    "switches": (switches, 50),
    "interrupts": (interrupts, 1000),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one of them, print its figures and, unless told otherwise, write them; 1 where they are bad."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance_cycles")
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--count", type=int)
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)
    run, usual_count = WHAT[options.what]
    report = run(options.count or usual_count)
    print(report)
    if not options.no_write:
        print(write_result(f"endurance_{options.what}", report, module="endurance_cycles"))
    return int(not report["ok"])


if __name__ == "__main__":
    sys.exit(main())
