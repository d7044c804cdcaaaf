"""What leaves the engine thread: deltas of one answer, and the stream that other threads read them from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlc_nb.errors import EngineTerminatedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlc_nb.protocol.responses import Usage

__all__ = ["FinishReason", "Outbox", "PromptLogprobs", "RequestStream", "StreamDelta", "TokenChance", "TokenLogprobs"]

FinishReason = Literal["stop", "length"]

# Python runs signal handlers between waits, so a Ctrl-C lands within one of them.
WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token, its text and bytes, and its log probability."""

    token_id: int
    token: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token, the likeliest ones in its place, and where its text begins in the answer."""

    chosen: TokenChance
    top: tuple[TokenChance, ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The tokens of a prompt, their log probabilities, those of the likeliest, and where each begins in the prompt.

    There is nothing to tell the first token from, so it has none.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[dict[str, float] | None, ...]
    text_offsets: tuple[int, ...]


@dataclass(slots=True)
class StreamDelta:
    """The next piece of an answer.

    Attributes
    ----------
    prompt_logprobs
        Set in the first piece of each answer where the request asked for them.
    index
        Which of the request's answers this is a piece of.
    text
        Whole characters that can no longer be a part of a stop string; may be empty.
    token_ids
        The tokens whose text is complete with this piece.
    logprobs
        One entry for each of ``token_ids`` where the request asked for them.
    finish_reason
        Set in the last piece of the answer only.
    usage
        Set in the last piece of the request only.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    prompt_logprobs: PromptLogprobs | None = None


class Outbox:
    """Passes deltas, or the error that ended the request, from the engine thread to any thread or event loop."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._items: deque[StreamDelta | Exception] = deque()
        self._wakers: list[Callable[[], None]] = []

    def put(self, item: StreamDelta | Exception) -> None:
        """Add an item and wake whoever waits."""
        with self._condition:
            self._items.append(item)
            self._condition.notify()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def take(self, timeout: float) -> StreamDelta | Exception | None:
        """Return the next item; None when there is none within ``timeout`` seconds."""
        with self._condition:
            if not self._items:
                self._condition.wait(timeout)
            return self._items.popleft() if self._items else None

    def take_or_call(self, wake: Callable[[], None]) -> StreamDelta | Exception | None:
        """Return the next item; where there is none, have ``wake`` called (on another thread) once there is one."""
        with self._condition:
            if self._items:
                return self._items.popleft()
            self._wakers.append(wake)
            return None


class RequestStream:
    """The deltas of one request, for ``for`` and for ``async for``, in any thread and any event loop.

    Closing the stream, dropping it, or an exception while it waits (Ctrl-C, a cancelled task) aborts the request.

    Parameters
    ----------
    outbox
        Where the engine puts the deltas.
    abort
        Tells the engine that nobody reads any more; does not wait. It must not refer to the stream.
    is_alive
        Whether the engine thread runs.
    """

    def __init__(
        self, request_id: str, outbox: Outbox, abort: Callable[[], None], is_alive: Callable[[], bool]
    ) -> None:
        self.request_id = request_id
        self._outbox = outbox
        self._is_alive = is_alive
        self._abort_if_dropped = weakref.finalize(self, abort)
        self._abort_if_dropped.atexit = False  # at exit the whole engine is terminated

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> StreamDelta:
        if not self._abort_if_dropped.alive:
            raise StopIteration
        try:
            item = self._outbox.take(WAIT_SECONDS)
            while item is None:
                item = self._outbox.take(WAIT_SECONDS if self._is_alive() else 0)
                if item is None:
                    self._check_alive()
        except BaseException:
            self.close()
            raise
        return self._opened(item)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamDelta:
        if not self._abort_if_dropped.alive:
            raise StopAsyncIteration
        try:
            loop = asyncio.get_running_loop()
            bell = _bell_of(loop)
            item = None
            while item is None:
                arrived: asyncio.Future[None] = loop.create_future()
                item = self._outbox.take_or_call(functools.partial(bell.ring, arrived))
                if item is None:
                    self._check_alive()
                    await arrived
        except BaseException:
            self.close()
            raise
        return self._opened(item)

    def close(self) -> None:
        """Abort the request unless it has ended; a second call does nothing."""
        self._abort_if_dropped()

    def abort(self) -> None:
        """End the request unless it has ended; whoever reads gets RequestAborted."""
        found = self._abort_if_dropped.peek()
        if found is not None:
            found[1]()

    def _check_alive(self) -> None:
        if not self._is_alive():
            raise EngineTerminatedError(
                "The engine's thread has ended, so this answer will not go on: make a new engine."
            )

    def _opened(self, item: StreamDelta | Exception) -> StreamDelta:
        if isinstance(item, Exception):
            self._abort_if_dropped.detach()
            raise item
        if item.usage is not None:
            self._abort_if_dropped.detach()
        return item


class _LoopBell:
    """Tells the readers in one event loop that something has arrived, with one call for all that come close together.

    Such a call is a system call, and a step has something for every reader.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._arrived: list[asyncio.Future[None]] = []

    def ring(self, arrived: asyncio.Future[None]) -> None:
        """Have ``arrived`` set in its loop; from any thread."""
        with self._lock:
            self._arrived.append(arrived)
            if len(self._arrived) > 1:
                return  # the loop has been called and has not come yet
        loop = self._loop()
        # A closed loop refuses the call. Its readers are gone, and dropping their streams has aborted the requests.
        with contextlib.suppress(RuntimeError):
            if loop is not None:
                loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for future in arrived:
            if not future.done():
                future.set_result(None)


def _bell_of(loop: asyncio.AbstractEventLoop) -> _LoopBell:
    with _bells_lock:
        bell = _bells.get(loop)
        if bell is None:
            bell = _bells[loop] = _LoopBell(loop)
        return bell


_bells_lock = threading.Lock()
_bells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBell] = weakref.WeakKeyDictionary()
