"""A soak of the real engine, and the comparison of requests together with the same requests alone (``make endurance``).

python -m benchmarks.endurance soak --requests 2000
python -m benchmarks.endurance equal

The tests run the same code, smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.machine import write_result
from mlc_nb import AsyncMLCEngine, EngineConfig, MLCEngine
from mlc_nb.engine.generation import ActiveRequest, GenerationRequest
from mlc_nb.errors import RequestAborted
from mlc_nb.runtime.sampler import SamplingState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlc_nb.engine.core import EngineCore

__all__ = ["Soak", "compare", "main", "prompts_of"]

MODEL = "smollm2"
FIRST_ID, LAST_ID = 1_000, 30_000
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WORDS = ["the", "model", "reads", "a", "page", "and", "writes", "what", "comes", "next", "of", "rivers", "in", "old"]
IDLE_SECONDS = 30.0


@dataclass
class Soak:
    """Random requests from several threads and an event loop at once, on a pool that is too small for all of them.

    Attributes
    ----------
    requests
        How many in all.
    seed
        Same seed, same requests; how they meet differs from run to run.
    """

    requests: int
    seed: int = 0
    threads: int = 3
    tasks: int = 6
    fates: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Run it; the report says what was left. Nothing should be."""
        started = time.monotonic()
        config = EngineConfig(max_num_sequence=8, max_total_sequence_length=640)
        before = {thread.ident for thread in threading.enumerate()}
        engine = MLCEngine(MODEL, engine_config=config)
        asynchronous = AsyncMLCEngine(MODEL, engine_config=config)
        assert asynchronous.core is engine.core
        self._numbers: Iterator[int] = iter(range(self.requests))
        self._lock = threading.Lock()
        workers = [threading.Thread(target=self._in_thread, args=(engine,)) for _ in range(self.threads)]
        workers.append(threading.Thread(target=lambda: asyncio.run(self._in_loop(asynchronous))))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        metrics = wait_until_idle(engine.core)
        report = {
            "requests": self.requests,
            "seconds": round(time.monotonic() - started, 1),
            "fates": self.fates,
            "problems": self.problems,
            "steps": metrics.steps,
            "decode_tokens": metrics.decode_tokens,
            "prompt_tokens": metrics.prompt_tokens,
            "cached_prompt_tokens": metrics.cached_prompt_tokens,
            "preemptions": metrics.preemptions,
            "finished_aborted_failed": [
                metrics.finished_requests,
                metrics.aborted_requests,
                metrics.failed_requests,
            ],
            "pages_held": metrics.total_pages - metrics.free_pages,
        }
        engine.reset()
        after = engine.metrics()
        report["pages_held_after_reset"] = after.total_pages - after.free_pages + after.prefix_cache_pages
        engine.terminate()
        gc.collect()
        report["requests_left_in_memory"] = sum(isinstance(thing, ActiveRequest) for thing in gc.get_objects())
        report["threads_left"] = [
            thread.name for thread in threading.enumerate() if thread.ident not in before and "engine" in thread.name
        ]
        report["megabytes"] = self.megabytes
        return report

    def _next(self) -> random.Random | None:
        with self._lock:
            number = next(self._numbers, None)
            if number is None:
                return None
            if number % max(1, self.requests // 20) == 0:
                self.megabytes.append(round(psutil.Process().memory_info().rss / 1e6, 1))
            return random.Random(self.seed * 1_000_003 + number)

    def _note(self, fate: str) -> None:
        with self._lock:
            self.fates[fate] = self.fates.get(fate, 0) + 1

    def _in_thread(self, engine: MLCEngine) -> None:
        while (source := self._next()) is not None:
            fate = source.choice(["whole", "whole", "stream", "break", "abort", "drop"])
            fields = request_fields(source)
            try:
                if fate == "whole":
                    check_answer(engine.chat.completions.create(**fields), fields)
                else:
                    self._stream(engine, fields, fate, source)
                self._note(fate)
            except RequestAborted:
                self._note("aborted")
            except Exception as error:
                self.problems.append(f"{fate} {fields}: {error!r}")

    def _stream(self, engine: MLCEngine, fields: dict[str, Any], fate: str, source: random.Random) -> None:
        stream = engine.chat.completions.create(**fields, stream=True)
        if fate == "drop":
            return
        leave_after = source.randrange(1, 12)
        for count, _ in enumerate(stream):
            if fate == "break" and count == leave_after:
                break
            if fate == "abort" and count == leave_after:
                engine.abort(stream.request_id)

    async def _in_loop(self, engine: AsyncMLCEngine) -> None:
        async def work() -> None:
            while (source := self._next()) is not None:
                fate = source.choice(["async whole", "async stream", "cancel"])
                fields = request_fields(source)
                try:
                    if fate == "async stream":
                        async for _ in await engine.chat.completions.create(**fields, stream=True):
                            pass
                    elif fate == "async whole":
                        check_answer(await engine.chat.completions.create(**fields), fields)
                    else:
                        task = asyncio.ensure_future(engine.chat.completions.create(**fields))
                        await asyncio.wait([task], timeout=source.uniform(0.0, 0.5))
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                    self._note(fate)
                except Exception as error:
                    self.problems.append(f"{fate} {fields}: {error!r}")

        await asyncio.gather(*(work() for _ in range(self.tasks)))


def request_fields(source: random.Random) -> dict[str, Any]:
    """A random chat request; many begin alike."""
    length = source.choice([3, 10, 30, 80, 150])
    text = " ".join([*(WORDS * 3)[: source.randrange(2) * 40], *source.choices(WORDS, k=length)])
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": source.choice([1, 5, 20, 60]),
        "temperature": source.choice([0.0, 1.0]),
        "seed": source.randrange(2**32),
    }
    kind = source.randrange(6)
    if kind == 0:
        fields["stop"] = source.choice([["the"], [".", "and"], "e"])
    elif kind == 1:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    elif kind == 2:
        fields["n"] = source.randrange(2, 4)
    elif kind == 3:
        fields |= {"logprobs": True, "top_logprobs": 2}
    return fields


def check_answer(answer: Any, fields: dict[str, Any]) -> None:
    choices = answer.choices
    if len(choices) != fields.get("n", 1) or any(choice.finish_reason not in ("stop", "length") for choice in choices):
        raise AssertionError(f"an answer is not whole: {answer}")
    if answer.usage.completion_tokens > fields["max_tokens"] * len(choices):
        raise AssertionError(f"an answer is too long: {answer.usage}")


def wait_until_idle(core: EngineCore) -> Any:
    """Return the metrics once no request is in flight."""
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        metrics = core.metrics()
        if metrics.running_requests + metrics.waiting_requests == 0:
            break
        time.sleep(0.01)
    return core.metrics()


def prompts_of(count: int, longest: int, seed: int = 3) -> list[list[int]]:
    """Prompts of random tokens and lengths; every second one begins like the others of its kind."""
    source = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [source.randint(FIRST_ID, LAST_ID) for _ in range(length)]

    system = ids(min(70, longest // 2))
    return [(system if index % 2 else []) + ids(source.randrange(1, longest // 2)) for index in range(count)]


def compare(
    prompts: Sequence[Sequence[int]], new_tokens: int, configs: Sequence[dict[str, Any]], activation_dtype: str
) -> list[str]:
    """Run the prompts alone, then together under each configuration; say where the tokens differ.

    The first half of every four is greedy, the second samples at temperature 1 with its own seed.
    """

    def requests() -> list[GenerationRequest]:
        return [
            GenerationRequest(
                str(index),
                tuple(prompt),
                SamplingState(temperature=float(index % 4 >= 2), seed=index),
                new_tokens,
            )
            for index, prompt in enumerate(prompts)
        ]

    def config_of(fields: dict[str, Any]) -> EngineConfig:
        return EngineConfig(
            activation_dtype=activation_dtype,
            max_num_sequence=len(prompts),
            max_total_sequence_length=len(prompts) * (max(map(len, prompts)) + new_tokens + 16),
            **fields,
        )

    def ids(stream: Any) -> list[int]:
        return [token_id for delta in stream for token_id in delta.token_ids]

    with MLCEngine(MODEL, engine_config=config_of({"prefix_cache_mode": "disable"})) as engine:
        alone = [ids(engine.core.submit(request)) for request in requests()]
    differences = []
    for fields in configs:
        with MLCEngine(MODEL, engine_config=config_of(fields)) as engine:
            for turn in ("first", "again"):  # the second time, the prefix cache has everything
                streams = [engine.core.submit(request) for request in requests()]
                together = [ids(stream) for stream in streams]
                differences += [
                    f"{activation_dtype} {fields}: request {index}, {turn} time"
                    for index in range(len(prompts))
                    if together[index] != alone[index]
                ]
    return differences


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance")
    parser.add_argument("what", choices=("soak", "equal"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)

    if options.what == "soak":
        report = Soak(options.requests, options.seed).run()
        # The first fifth fills caches and pools.
        settled = report["megabytes"][len(report["megabytes"]) // 5 :]
        report["growth_megabytes"] = round(settled[-1] - settled[0], 1) if settled else 0.0
        failed = bool(
            report["problems"]
            or report["pages_held"]
            or report["pages_held_after_reset"]
            or report["requests_left_in_memory"]
            or report["threads_left"]
            or report["growth_megabytes"] > 20
        )
    else:
        configs = [
            {"num_threads": threads, "prefix_cache_mode": mode, "prefill_chunk_size": chunk}
            for threads, mode, chunk in itertools.product((1, 2), ("radix", "disable"), (32, 256, 2048))
        ]
        differences = [
            difference
            for activation_dtype in ("auto", "float32")
            for difference in compare(prompts_of(32, 200), 24, configs, activation_dtype)
        ]
        report = {"requests": 32, "configurations": 2 * len(configs), "differences": differences}
        failed = bool(differences)
    print(report)
    if not options.no_write:
        print(write_result(f"endurance_{options.what}", report, module="endurance"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
