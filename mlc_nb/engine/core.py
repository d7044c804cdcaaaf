"""The engine: one thread that owns scheduler, pages and model runner; everyone else sends it messages."""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from time import monotonic
from typing import TYPE_CHECKING, Literal

from mlc_nb.engine.courier import Courier
from mlc_nb.engine.generation import ActiveRequest, GenerationRequest
from mlc_nb.engine.holders import Holders
from mlc_nb.engine.step_loop import StepLoop, aborted, describe
from mlc_nb.engine.stream import WAIT_SECONDS, RequestStream
from mlc_nb.engine.thread_start import started
from mlc_nb.engine.token_bytes import TokenBytes
from mlc_nb.errors import BadRequestError, EngineTerminatedError, MLCError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from mlc_nb.engine.metrics import EngineMetrics
    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.engine.room import Room
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.runtime.memory import MemoryUse
    from mlc_nb.runtime.step import ModelRunner

__all__ = ["EngineCore", "EngineState"]

EngineState = Literal["starting", "ready", "failed", "terminated"]

TERMINATE_SECONDS = 2.0
TERMINATED = "the engine was terminated (or its model unloaded) while the request ran"

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
    room
        What of the device's memory the engine may take when it is resized; None lets it not be resized.

    Attributes
    ----------
    on_end
        Called once, on the engine's thread, when the engine has ended and its memory is free.

    Raises
    ------
    MLCError
        What opening the runner raised; nothing is left behind then.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, room: Room | None = None) -> None:
        self.config: EngineConfig = model.config or config
        self.holders = Holders()
        self._rules = model.config.rules if model.config is not None else {}
        self.state: EngineState = "starting"
        self._room = room
        self._model: LoadedModel | None = model
        self._token_bytes: TokenBytes | None = TokenBytes(model.tokenizer)
        self._failure: BaseException | None = None
        self.on_end: Callable[[], None] = _do_nothing
        self._process_id = os.getpid()
        self._last_used = monotonic()
        self._resizing = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Reentrant: what a property may ask under it, others ask without it.
        self._lock = threading.RLock()
        self._in_flight: dict[str, ActiveRequest] = {}
        self._started = threading.Event()
        self._terminating = threading.Event()
        # Made on the engine thread, and its own but for the metrics.
        self._loop: StepLoop
        self._measure_memory: Callable[[], MemoryUse] | None = None
        self._thread = threading.Thread(target=self._run, name=f"mlc_nb engine {model.model_id}", daemon=True)
        self._courier = started(lambda: Courier(f"{self._thread.name} courier"))
        try:
            started(self._thread.start)
        except BaseException:
            self._courier.close()
            raise
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
    def idle_seconds(self) -> float:
        """Seconds since the last request ended (or since the start); 0 while one is in flight or the cache resized."""
        # Without the lock: it may be asked by an engine that is being resized of another one that is.
        return 0.0 if self._in_flight or self._resizing else monotonic() - self._last_used

    @property
    def max_sequence_length(self) -> int:
        """Most tokens, prompt and answer together, that one request can have."""
        limits = [self.model.context_window_size, self._loop.capacity]
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
        num_prompt_tokens = len(request.prompt_token_ids)
        with self._lock:
            limit = self.max_sequence_length
            if num_prompt_tokens >= limit:
                raise BadRequestError(
                    f"The prompt has {num_prompt_tokens} tokens, but prompt and answer together can have at most "
                    f"{limit}{self._why('max_single_sequence_length')}: shorten the prompt, or the conversation "
                    "before it."
                )
            room = limit - num_prompt_tokens
            assert self._token_bytes is not None  # see model
            if request.request_id in self._in_flight:
                raise BadRequestError(f"request_id {request.request_id!r} is in flight already: give each its own.")
            max_new_tokens = min(request.max_tokens or room, room)
            active = ActiveRequest(request, self._token_bytes, max_new_tokens, self._sharing(request))
            # Not a bound method of the stream: a stream that is dropped must be able to go. It exists before the
            # request does, so that an interrupt in between leaves no request without a reader.
            abort = functools.partial(self._inbox.put, functools.partial(self._loop.abort, active))
            stream = RequestStream(request.request_id, active.outbox, abort, self._thread.is_alive)
            self._in_flight[request.request_id] = active
            self._inbox.put(functools.partial(self._loop.admit, active))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets RequestAborted. Does nothing where no such request is in flight."""
        with self._lock:
            active = self._in_flight.get(request_id)
        if active is not None:
            self._inbox.put(functools.partial(self._loop.abort, active))

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

    def resize_kv_cache(self, max_total_sequence_length: int) -> None:
        """Make the KV cache anew for so many tokens; the weights stay where they are.

        One request can still have no more tokens than when the engine was made.

        Raises
        ------
        BadRequestError
            Requests are in flight, or the number is one that this engine cannot have.
        OutOfMemoryError
            It does not fit; the old cache stays.
        EngineTerminatedError
            The engine was terminated or failed.
        """
        answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        with self._lock:
            self._check_ready()
            self._inbox.put(functools.partial(self._resize, max_total_sequence_length, answers))
        while self._thread.is_alive():
            try:
                error = answers.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            return
        with self._lock:
            self._check_ready()

    def metrics(self) -> EngineMetrics:
        """Return a copy of the counts and times so far.

        Raises
        ------
        EngineTerminatedError
            The engine was terminated or failed.
        """
        with self._lock:
            self._check_ready()
        return self._loop.metrics()

    def memory(self) -> MemoryUse:
        """Measure what the engine holds on its device now.

        Raises
        ------
        EngineTerminatedError
            The engine was terminated or failed.
        """
        measure = self._measure_memory
        self._check_ready()  # see idle_seconds
        if measure is None:
            raise EngineTerminatedError("The engine was terminated: make a new engine.")
        return measure()

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
            raise EngineTerminatedError(f"The engine failed: {describe(self._failure)} Make a new engine.") from (
                self._failure
            )
        if self.state != "ready" or self._terminating.is_set():
            raise EngineTerminatedError("The engine was terminated: make a new engine.")

    def _sharing(self, request: GenerationRequest) -> Hashable:
        if self.config.caches_prefixes:
            return "all requests"
        # Answers to one prompt share its pages all the same: with each other alone.
        return object() if request.more_choices else None

    def _why(self, field: str) -> str:
        rule = self._rules.get(field)
        return f" ({field}: {rule})" if rule else ""

    # On the engine thread.

    def _run(self) -> None:
        runner: ModelRunner | None = None
        try:
            assert self._model is not None  # only _end drops it
            runner = self._model.open_runner()
            self._loop = StepLoop(self._model.model_id, runner, self.config, self._courier, self._forget)
            self._measure_memory = runner.memory
            with self._lock:
                if self.state == "starting":
                    self.state = "ready"
            self._started.set()
            while not self._terminating.is_set():
                self._read_inbox()
                if self._loop.has_work and not self._terminating.is_set():
                    self._loop.step()
            self._loop.hand_over()
            self._end("terminated")
        except BaseException as error:  # whatever ends the loop must reach those who wait for it
            self._failure = error
            if hasattr(self, "_loop"):
                self._loop.hand_over()
            self._end("failed")
        finally:
            # Readers take this thread for the source of their deltas: it ends when they have all of them.
            self._courier.close()
            self._started.set()
            if runner is not None:
                _close(runner)
            if hasattr(self, "_loop"):
                self._loop.let_go()
            self.on_end()

    def _read_inbox(self) -> None:
        """Handle all messages; wait for one where there is nothing else to do."""
        if not self._loop.has_work:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _forget(self, active: ActiveRequest) -> None:
        """Free the request's id; the id may be another request's by now."""
        with self._lock:
            if self._in_flight.get(active.request.request_id) is active:
                del self._in_flight[active.request.request_id]
                self._last_used = monotonic()

    def _reset(self, done: threading.Event) -> None:
        self._loop.reset()
        done.set()

    def _resize(self, total: int, answers: queue.SimpleQueue[Exception | None]) -> None:
        try:
            self._resizing = True
            with self._lock:  # no request can come while its limits change
                if self._model is None or self._model.resized is None or self._room is None:
                    raise BadRequestError("The KV cache of this engine cannot be resized: make a new engine.")
                if self._in_flight:
                    raise BadRequestError("Requests are in flight: the KV cache can be resized when they have ended.")
                limits, config = self._model.resized(total, self._room)
                self._loop.resize(limits.pages)
                self.config, self._rules = config, config.rules
        except Exception as error:
            answers.put(error)
        else:
            answers.put(None)
        finally:
            self._resizing = False

    def _end(self, state: EngineState) -> None:
        """Refuse new requests, end those in flight and drop the model."""
        with self._lock:
            if self.state not in ("failed", "terminated"):
                self.state = state
            in_flight = list(self._in_flight.values())
            self._in_flight.clear()
            self._model = self._token_bytes = self._measure_memory = None
        if threading.current_thread() is self._thread:
            self._courier.send([(active.outbox, self._ending(active, state)) for active in in_flight])
            return
        for active in in_flight:  # the engine thread is in a native call that lasts; nothing more comes from it
            active.outbox.put(self._ending(active, state))

    def _ending(self, active: ActiveRequest, state: EngineState) -> MLCError:
        return aborted(active, TERMINATED) if state == "terminated" else self._failed(active)

    def _failed(self, active: ActiveRequest) -> EngineTerminatedError:
        error = EngineTerminatedError(
            f"The engine failed while request {active.request.request_id} was in flight: {describe(self._failure)} "
            "Make a new engine."
        )
        error.__cause__ = self._failure
        return error


def _close(runner: ModelRunner) -> None:
    try:
        runner.close()
    except Exception:
        # The engine has ended either way, and there may be nobody left to raise to.
        _log.exception("Closing the model runner failed; some of its memory may not be free.")


def _do_nothing() -> None:
    """Wake the engine thread, or leave an end to itself."""
