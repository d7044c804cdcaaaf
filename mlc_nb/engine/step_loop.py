"""Runs requests step by step on one model runner. Everything here belongs to the engine thread."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from mlc_nb.engine.block_manager import BlockManager
from mlc_nb.engine.metrics import EngineMetrics
from mlc_nb.engine.prefill_pacer import PrefillPacer
from mlc_nb.engine.prefix_cache import PrefixCache
from mlc_nb.engine.scheduler import ScheduledSlice, Scheduler
from mlc_nb.errors import MLCError, RequestAborted
from mlc_nb.runtime.step import SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlc_nb.engine.courier import Courier
    from mlc_nb.engine.generation import ActiveChoice, ActiveRequest
    from mlc_nb.engine.sequence import Sequence
    from mlc_nb.engine.stream import Outbox, StreamDelta
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.runtime.step import ModelRunner, StepResult

__all__ = ["StepLoop", "aborted", "describe"]

ABORTED = "it was aborted by abort(...), or its stream or engine was closed"


class StepLoop:
    """The requests in flight, their pages, and what was measured of them.

    Parameters
    ----------
    courier
        Takes the deltas to the readers.
    on_end
        Called with each request that has ended, before its reader can know.
    """

    def __init__(
        self,
        model_id: str,
        runner: ModelRunner,
        config: EngineConfig,
        courier: Courier,
        on_end: Callable[[ActiveRequest], None],
    ) -> None:
        self._runner = runner
        self._courier = courier
        self._on_end = on_end
        self._blocks = BlockManager(runner.num_pages, runner.page_size)
        self._cache = PrefixCache(self._blocks, config.max_idle_sequences)
        self._scheduler = Scheduler(self._blocks, self._cache, config.num_sequences)
        self._pacer = PrefillPacer(config.prefill_chunk, runner.least_prefill_chunk)
        self._active: dict[Sequence, ActiveChoice] = {}
        self._parcel: list[tuple[Outbox, StreamDelta | Exception]] = []
        self._empty_metrics = EngineMetrics(
            model_id, total_pages=runner.num_pages, weight_bytes=runner.weight_bytes, kv_bytes=runner.kv_bytes
        )
        self._metrics = replace(self._empty_metrics)
        self._max_idle_sequences = config.max_idle_sequences

    def resize(self, num_pages: int) -> None:
        """Make the KV cache anew in another size; there must be no requests.

        Raises
        ------
        OutOfMemoryError
            There is no memory for it; everything is as before.
        """
        runner = self._runner
        runner.resize_kv_cache(num_pages)
        self._blocks = BlockManager(runner.num_pages, runner.page_size)
        self._cache = PrefixCache(self._blocks, self._max_idle_sequences)
        self._scheduler.use_pool(self._blocks, self._cache)
        for metrics in (self._empty_metrics, self._metrics):
            metrics.total_pages, metrics.kv_bytes = runner.num_pages, runner.kv_bytes

    def let_go(self) -> None:
        """Drop the runner, whose owner closes it: metrics outlive it, and no step follows."""
        del self._runner

    @property
    def capacity(self) -> int:
        """Tokens that the KV pages hold."""
        return self._blocks.num_pages * self._blocks.page_size

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def metrics(self) -> EngineMetrics:
        """Return a copy of the counts and times so far; from any thread."""
        return replace(
            self._metrics,
            running_requests=self._scheduler.num_running,
            waiting_requests=self._scheduler.num_waiting,
            free_pages=self._blocks.num_free,
            prefix_cache_pages=self._cache.num_pages,
            preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._scheduler.num_prompt_tokens,
            cached_prompt_tokens=self._scheduler.num_cached_tokens,
        )

    def admit(self, active: ActiveRequest) -> None:
        """Put the answers of a request in line."""
        for choice in active.choices:
            self._active[choice.sequence] = choice
            self._scheduler.add(choice.sequence)

    def abort(self, active: ActiveRequest, reason: str = ABORTED) -> None:
        """End a request whose reader has gone or wants no more; one that has ended stays as it is."""
        in_flight = any(choice.sequence in self._active for choice in active.choices)
        for choice in active.choices:
            self._leave(choice)
        self._on_end(active)
        if in_flight:
            self._metrics.aborted_requests += 1
            self._parcel.append((active.outbox, aborted(active, reason)))
            self.hand_over()

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache and begin to count anew."""
        for choice in list(self._active.values()):
            self.abort(choice.active, "the engine was reset while the request ran")
        self._cache.clear()
        self._scheduler.reset_counts()
        self._metrics = replace(self._empty_metrics)

    def step(self) -> None:
        """Run the model once and hand out what comes of it."""
        scheduled = self._scheduler.schedule(self._pacer.chunk_size(self._scheduler.num_decoding))
        if not scheduled:
            raise RuntimeError("The scheduler has requests but can run none of them: KV pages were lost.")
        started = perf_counter()
        num_decodes = num_prefill_tokens = 0
        for item in scheduled:
            if item.is_prefill:
                num_prefill_tokens += item.num_tokens
                times = self._active[item.sequence].active.times
                if times.first_step is None:
                    times.first_step = started
            else:
                num_decodes += 1
        sampled = self._runner.step([item.as_step_slice() for item in scheduled], self.hand_over)
        seconds = perf_counter() - started
        self._pacer.record(num_prefill_tokens, num_decodes, seconds)
        self._metrics.record_step(num_prefill_tokens, num_decodes, seconds)
        self._scheduler.advance(
            scheduled, [token.token_id if isinstance(token, SampledToken) else None for token in sampled]
        )
        self._deliver(scheduled, sampled)
        if not self.has_work:
            self.hand_over()

    def hand_over(self) -> None:
        """Let the courier bring what is ready.

        What a step gives is handed over when the next one is under way, so that the readers whom it wakes do not hold
        that one up.
        """
        self._courier.send(self._parcel)
        self._parcel = []

    def _deliver(self, scheduled: list[ScheduledSlice], sampled: list[StepResult]) -> None:
        for item, token in zip(scheduled, sampled, strict=True):
            if token is None:
                continue
            choice = self._active.get(item.sequence)
            if choice is None:
                continue  # another answer of the same request has failed in this step
            active = choice.active
            if isinstance(token, Exception):
                self._parcel.append((active.outbox, self._fail(active, token)))
                continue
            try:
                delta = choice.take(token)
            except Exception as error:  # a request that fails fails alone
                self._parcel.append((active.outbox, self._fail(active, error)))
                continue
            if delta.finish_reason is not None:
                # Before the reader can know: whoever sees the end also sees the pages free.
                self._leave(choice)
                if delta.usage is not None:
                    self._metrics.finished_requests += 1
                    self._metrics.last_finished_request = delta.usage.extra
                    self._on_end(active)
            if delta.text or delta.token_ids or delta.finish_reason is not None or delta.prompt_logprobs is not None:
                self._parcel.append((active.outbox, delta))

    def _leave(self, choice: ActiveChoice, *, keep: bool = True) -> None:
        if self._active.pop(choice.sequence, None) is not None:
            self._scheduler.finish(choice.sequence, keep=keep)

    def _fail(self, active: ActiveRequest, error: Exception) -> MLCError:
        self._metrics.failed_requests += 1
        failure = MLCError(f"Request {active.request.request_id} failed: {describe(error)}")
        failure.__cause__ = error
        for choice in active.choices:
            # The pages may hold what made it fail, such as numbers that are not finite.
            self._leave(choice, keep=False)
        self._on_end(active)
        return failure


def aborted(active: ActiveRequest, reason: str) -> RequestAborted:
    """The error that the reader of an aborted request gets; ``reason`` is a sentence without its full stop."""
    return RequestAborted(f"Request {active.request.request_id} did not finish: {reason}.")


def describe(error: BaseException | None) -> str:
    """The message of an error, as a sentence; its type in front where it is none of our own."""
    text = str(error) or "no message"
    kind = "" if isinstance(error, MLCError) else f"{type(error).__name__}: "
    return kind + text + ("" if text.endswith((".", "!", "?")) else ".")
