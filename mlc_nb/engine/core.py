"""The engine: one thread that owns scheduler, pages and model runner; everyone else sends it messages."""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from dataclasses import replace
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Literal

from mlc_nb.engine.block_manager import BlockManager
from mlc_nb.engine.courier import Courier
from mlc_nb.engine.generation import ActiveChoice, ActiveRequest, GenerationRequest
from mlc_nb.engine.metrics import EngineMetrics
from mlc_nb.engine.prefill_pacer import PrefillPacer
from mlc_nb.engine.prefix_cache import PrefixCache
from mlc_nb.engine.scheduler import ScheduledSlice, Scheduler
from mlc_nb.engine.stream import WAIT_SECONDS, RequestStream
from mlc_nb.engine.token_bytes import TokenBytes
from mlc_nb.errors import BadRequestError, EngineTerminatedError, MLCError, RequestAborted
from mlc_nb.runtime.step import SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.engine.sequence import Sequence
    from mlc_nb.engine.stream import Outbox, StreamDelta
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.runtime.step import ModelRunner, StepResult

__all__ = ["EngineCore", "EngineState"]

EngineState = Literal["starting", "ready", "failed", "terminated"]

TERMINATE_SECONDS = 2.0

_log = logging.getLogger(__name__)


class EngineCore:
    """Runs requests on one model with continuous batching.

    The constructor opens the model runner on the engine's own thread and returns when it is ready. All methods may be
    called from any thread; none but the constructor and `terminate` waits for the engine.

    Parameters
    ----------
    model
        What to run.
    config
        Limits and sizes, resolved by `resolve_engine_config`.

    Raises
    ------
    MLCError
        What opening the runner raised; nothing is left behind then.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self.state: EngineState = "starting"
        self._model: LoadedModel | None = model
        self._token_bytes: TokenBytes | None = TokenBytes(model.tokenizer)
        self._failure: BaseException | None = None
        self._process_id = os.getpid()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._in_flight: dict[str, ActiveRequest] = {}
        self._started = threading.Event()
        self._terminating = threading.Event()
        self._metrics = EngineMetrics()
        # The rest belongs to the engine thread alone.
        self._active: dict[Sequence, ActiveChoice] = {}
        self._scheduler: Scheduler
        self._blocks: BlockManager
        self._cache: PrefixCache
        self._pacer: PrefillPacer
        self._courier: Courier
        self._weight_bytes = self._kv_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"mlc_nb engine {model.model_id}", daemon=True)
        self._thread.start()
        self._wait_until_started()

    @property
    def model(self) -> LoadedModel:
        """What the engine runs.

        Raises
        ------
        EngineTerminatedError
            The engine was terminated or failed.
        """
        with self._lock:
            self._check_ready()
            assert self._model is not None  # it is dropped in the same locked section that ends the ready state
            return self._model

    @property
    def max_sequence_length(self) -> int:
        """Most tokens, prompt and answer together, that one request can have."""
        limits = [self.model.context_window_size, self._blocks.num_pages * self._blocks.page_size]
        if self.config.max_single_sequence_length is not None:
            limits.append(self.config.max_single_sequence_length)
        return min(limits)

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Put a request in line.

        Raises
        ------
        BadRequestError
            The prompt leaves no room for an answer, or a request with the same id is in flight.
        EngineTerminatedError
            The engine was terminated or failed.
        """
        limit = self.max_sequence_length
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens >= limit:
            raise BadRequestError(
                f"The prompt has {num_prompt_tokens} tokens, but prompt and answer together can have at most {limit}: "
                "shorten the prompt, or the conversation before it."
            )
        room = limit - num_prompt_tokens
        with self._lock:
            self._check_ready()
            assert self._token_bytes is not None  # see model
            if request.request_id in self._in_flight:
                raise BadRequestError(f"request_id {request.request_id!r} is in flight already: give each its own.")
            max_new_tokens = min(request.max_tokens or room, room)
            active = ActiveRequest(request, self._token_bytes, max_new_tokens, self._sharing(request))
            # Not a bound method of the stream: a stream that is dropped must be able to go. It exists before the
            # request does, so that an interrupt in between leaves no request without a reader.
            abort = functools.partial(self._inbox.put, functools.partial(self._abort, active))
            stream = RequestStream(request.request_id, active.outbox, abort, self._thread.is_alive)
            self._in_flight[request.request_id] = active
            self._inbox.put(functools.partial(self._admit, active))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets RequestAborted. Does nothing where no such request is in flight."""
        with self._lock:
            active = self._in_flight.get(request_id)
        if active is not None:
            self._inbox.put(functools.partial(self._abort, active))

    def reset(self) -> None:
        """Abort all requests in flight, empty the prefix cache and set the metrics to zero.

        Raises
        ------
        EngineTerminatedError
            The engine was terminated or failed.
        """
        done = threading.Event()
        with self._lock:
            self._check_ready()
            self._inbox.put(functools.partial(self._reset, done))
        while not done.wait(WAIT_SECONDS) and self._thread.is_alive():
            pass

    def metrics(self) -> EngineMetrics:
        """Return a copy of the counts and times so far.

        Raises
        ------
        EngineTerminatedError
            The engine was terminated or failed.
        """
        with self._lock:
            self._check_ready()
        return replace(
            self._metrics,
            running_requests=self._scheduler.num_running,
            waiting_requests=self._scheduler.num_waiting,
            free_pages=self._blocks.num_free,
            total_pages=self._blocks.num_pages,
            prefix_cache_pages=self._cache.num_pages,
            weight_bytes=self._weight_bytes,
            kv_bytes=self._kv_bytes,
            preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._scheduler.num_prompt_tokens,
            cached_prompt_tokens=self._scheduler.num_cached_tokens,
        )

    def begin_terminate(self) -> None:
        """Let the engine thread end as soon as it can; does not wait. `terminate` does the rest."""
        self._terminating.set()
        self._inbox.put(_do_nothing)

    def terminate(self) -> None:
        """Abort all requests, release the model and end the thread, within 2 s; a second call does nothing.

        A native call that lasts longer is left behind on its daemon thread, which releases the model when it returns.
        """
        self.begin_terminate()
        if threading.current_thread() is self._thread or os.getpid() != self._process_id:
            return
        deadline = monotonic() + TERMINATE_SECONDS
        while self._thread.is_alive() and monotonic() < deadline:
            self._thread.join(WAIT_SECONDS)
        if self._thread.is_alive():
            _log.warning("The engine is still in a native call %.0f s after terminate().", TERMINATE_SECONDS)
            self._end("terminated")

    # On the caller's thread.

    def _wait_until_started(self) -> None:
        try:
            while not self._started.wait(WAIT_SECONDS):
                pass
        except BaseException:
            self.terminate()
            raise
        if self._failure is not None:
            self._thread.join(TERMINATE_SECONDS)
            raise self._failure

    def _check_ready(self) -> None:
        if os.getpid() != self._process_id:
            raise EngineTerminatedError(
                f"This engine runs in process {self._process_id}, of which this one is a fork: make an engine here."
            )
        if self.state == "failed":
            raise EngineTerminatedError(f"The engine failed: {_describe(self._failure)} Make a new engine.") from (
                self._failure
            )
        if self.state != "ready" or self._terminating.is_set():
            raise EngineTerminatedError("The engine was terminated: make a new engine.")

    def _sharing(self, request: GenerationRequest) -> Hashable:
        if self.config.caches_prefixes:
            return "all requests"
        # Answers to one prompt share its pages all the same: with each other alone.
        return object() if request.more_choices else None

    # On the engine thread.

    def _run(self) -> None:
        runner: ModelRunner | None = None
        self._courier = Courier(f"{threading.current_thread().name} courier")
        try:
            assert self._model is not None  # only _end drops it
            runner = self._model.open_runner()
            self._prepare(runner)
            self._started.set()
            while not self._terminating.is_set():
                self._read_inbox()
                if self._scheduler.has_work and not self._terminating.is_set():
                    self._step(runner)
            self._end("terminated")
        except BaseException as error:  # whatever ends the loop must reach those who wait for it
            self._failure = error
            self._end("failed")
        finally:
            self._active.clear()
            # Readers take this thread for the source of their deltas: it ends when they have all of them.
            self._courier.close()
            self._started.set()
            if runner is not None:
                _close(runner)

    def _prepare(self, runner: ModelRunner) -> None:
        self._blocks = BlockManager(runner.num_pages, runner.page_size)
        self._cache = PrefixCache(self._blocks, self.config.max_idle_sequences)
        self._scheduler = Scheduler(self._blocks, self._cache, self.config.num_sequences)
        self._pacer = PrefillPacer(self.config.prefill_chunk)
        self._weight_bytes, self._kv_bytes = runner.weight_bytes, runner.kv_bytes
        with self._lock:
            if self.state == "starting":
                self.state = "ready"

    def _read_inbox(self) -> None:
        """Handle all messages; wait for one where there is nothing else to do."""
        if not self._scheduler.has_work:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _step(self, runner: ModelRunner) -> None:
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
        sampled = runner.step([item.as_step_slice() for item in scheduled])
        seconds = perf_counter() - started
        self._pacer.record(num_prefill_tokens, num_decodes, seconds)
        self._metrics.record_step(num_prefill_tokens, num_decodes, seconds)
        self._scheduler.advance(
            scheduled, [token.token_id if isinstance(token, SampledToken) else None for token in sampled]
        )
        self._deliver(scheduled, sampled)

    def _deliver(self, scheduled: list[ScheduledSlice], sampled: list[StepResult]) -> None:
        parcel: list[tuple[Outbox, StreamDelta | Exception]] = []
        for item, token in zip(scheduled, sampled, strict=True):
            if token is None:
                continue
            choice = self._active.get(item.sequence)
            if choice is None:
                continue  # another answer of the same request has failed in this step
            active = choice.active
            if isinstance(token, Exception):
                self._fail(active, token)
                continue
            try:
                delta = choice.take(token)
            except Exception as error:  # a request that fails fails alone
                self._fail(active, error)
                continue
            if delta.finish_reason is not None:
                # Before the reader can know: whoever sees the end also sees the pages free.
                self._leave(choice)
                if delta.usage is not None:
                    self._metrics.finished_requests += 1
                    self._metrics.last_finished_request = delta.usage.extra
                    self._forget(active)
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                parcel.append((active.outbox, delta))
        self._courier.send(parcel)

    def _admit(self, active: ActiveRequest) -> None:
        for choice in active.choices:
            self._active[choice.sequence] = choice
            self._scheduler.add(choice.sequence)

    def _leave(self, choice: ActiveChoice, *, keep: bool = True) -> None:
        if self._active.pop(choice.sequence, None) is not None:
            self._scheduler.finish(choice.sequence, keep=keep)

    def _fail(self, active: ActiveRequest, error: Exception) -> None:
        self._metrics.failed_requests += 1
        failure = MLCError(f"Request {active.request.request_id} failed: {_describe(error)}")
        failure.__cause__ = error
        for choice in active.choices:
            # The pages may hold what made it fail, such as numbers that are not finite.
            self._leave(choice, keep=False)
        self._forget(active)
        self._courier.send([(active.outbox, failure)])

    def _abort(self, active: ActiveRequest) -> None:
        in_flight = any(choice.sequence in self._active for choice in active.choices)
        for choice in active.choices:
            self._leave(choice)
        self._forget(active)
        if in_flight:
            self._metrics.aborted_requests += 1
            self._courier.send([(active.outbox, _aborted(active))])

    def _forget(self, active: ActiveRequest) -> None:
        """Free the request's id; the id may be another request's by now."""
        with self._lock:
            if self._in_flight.get(active.request.request_id) is active:
                del self._in_flight[active.request.request_id]

    def _reset(self, done: threading.Event) -> None:
        for choice in list(self._active.values()):
            self._abort(choice.active)
        self._cache.clear()
        self._metrics = EngineMetrics()
        self._scheduler.reset_counts()
        done.set()

    def _end(self, state: EngineState) -> None:
        """Refuse new requests, end those in flight and drop the model."""
        with self._lock:
            if self.state not in ("failed", "terminated"):
                self.state = state
            in_flight = list(self._in_flight.values())
            self._in_flight.clear()
            self._model = self._token_bytes = None
        if threading.current_thread() is self._thread:
            self._courier.send([(active.outbox, self._ending(active, state)) for active in in_flight])
            return
        for active in in_flight:  # the engine thread is in a native call that lasts; nothing more comes from it
            active.outbox.put(self._ending(active, state))

    def _ending(self, active: ActiveRequest, state: EngineState) -> MLCError:
        return _aborted(active) if state == "terminated" else self._failed(active)

    def _failed(self, active: ActiveRequest) -> EngineTerminatedError:
        error = EngineTerminatedError(
            f"The engine failed while request {active.request.request_id} was in flight: {_describe(self._failure)} "
            "Make a new engine."
        )
        error.__cause__ = self._failure
        return error


def _aborted(active: ActiveRequest) -> RequestAborted:
    return RequestAborted(f"Request {active.request.request_id} was aborted before it finished.")


def _describe(error: BaseException | None) -> str:
    text = str(error) or "no message"
    return f"{type(error).__name__}: {text}" + ("" if text.endswith((".", "!", "?")) else ".")


def _close(runner: ModelRunner) -> None:
    try:
        runner.close()
    except Exception:
        # The engine has ended either way, and there may be nobody left to raise to.
        _log.exception("Closing the model runner failed; some of its memory may not be free.")


def _do_nothing() -> None:
    """Wake the engine thread."""
