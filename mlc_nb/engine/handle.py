"""What the sync and the async engine share: arguments, the core, and requests up to the stream of deltas."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mlc_nb.engine import prepare
from mlc_nb.engine.provider import acquire_core
from mlc_nb.engine.responses import ChatResponder, CompletionResponder, Responder
from mlc_nb.engine.tool_use import plan_tool_use
from mlc_nb.errors import BadRequestError, EngineTerminatedError
from mlc_nb.protocol.common import short_repr
from mlc_nb.protocol.engine_config import EngineConfig, resolve_engine_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from mlc_nb.engine.core import EngineCore
    from mlc_nb.engine.generation import GenerationRequest
    from mlc_nb.engine.stream import RequestStream
    from mlc_nb.protocol.chat import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse
    from mlc_nb.protocol.completions import CompletionRequest, CompletionResponse

__all__ = ["AsyncChunkStream", "ChunkStream", "EngineHandle"]

ChunkT = TypeVar("ChunkT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[ChunkT, ResponseT]):
    """What the engine runs, and what shapes its answers."""

    generation: GenerationRequest
    responder: Responder[ChunkT, ResponseT]


class EngineHandle:
    """Holds a reference to an engine core, nothing else; see `MLCEngine` for the parameters."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        device: str = "auto",
        *,
        model_lib: str | os.PathLike[str] | None = None,
        mode: str = "local",
        engine_config: EngineConfig | Mapping[str, Any] | None = None,
        enable_tracing: bool = False,
    ) -> None:
        if enable_tracing is not False:
            raise BadRequestError("enable_tracing is not supported yet: leave it out.")
        if not isinstance(device, str) or not device:
            raise BadRequestError(f"device must be a string such as 'auto' or 'cpu', got {short_repr(device)}.")
        config = resolve_engine_config(
            engine_config,
            model=_as_text("model", model),
            model_lib=_as_text("model_lib", model_lib),
            mode=mode,
        )
        _as_text("engine_config.model", config.model)
        _as_text("engine_config.model_lib", config.model_lib)
        if config.model is None:
            from mlc_nb.weights.source import DEFAULT_MODEL

            config = config.model_copy(update={"model": DEFAULT_MODEL})
        assert config.model is not None  # set just above
        self.model: str = config.model
        self.device = device
        self._core = acquire_core(config.model, device, config.model_lib, config)
        while not self._core.holders.add():  # its last handle has gone in the meantime
            self._core = acquire_core(config.model, device, config.model_lib, config)
        self._release_lock = threading.Lock()
        self._released = False
        self._process_id = os.getpid()
        self._streams: weakref.WeakSet[RequestStream] = weakref.WeakSet()
        self._dropped = weakref.finalize(self, _drop, self._core, self._process_id)
        self._dropped.atexit = False
        self._model_names = frozenset({config.model, self._core.model.model_id})

    @property
    def core(self) -> EngineCore:
        """The engine core, which other handles may share.

        Raises
        ------
        EngineTerminatedError
            This handle was released.
        """
        if self._released:
            raise EngineTerminatedError("This engine was released at the end of its `with` block: make a new engine.")
        return self._core

    @property
    def config(self) -> EngineConfig:
        """The configuration that the core runs with."""
        return self._core.config

    def _submit(self, generation: GenerationRequest) -> RequestStream:
        stream = self.core.submit(generation)
        with self._release_lock:
            self._streams.add(stream)
            if self._released:  # by another thread, a moment ago
                stream.abort()
        return stream

    def _release(self) -> None:
        """Abort the requests of this handle and let go of the core, which ends unless other handles use it."""
        with self._release_lock:
            if self._released:
                return
            self._released = True
            streams = list(self._streams)
        self._dropped.detach()
        if os.getpid() != self._process_id:  # a fork owns nothing of its parent's
            return
        if self._core.holders.remove(released=True):
            self._core.terminate()
            return
        for stream in streams:
            stream.abort()

    def terminate(self) -> None:
        """Abort all requests in flight, release the model's memory and end the engine thread, within 2 s.

        Every later call raises EngineTerminatedError, but for `terminate`, which does nothing. Engines that share the
        core (the same model and configuration in one process) end with it; the end of a ``with`` block releases this
        one alone.
        """
        if not self._released:
            self._core.terminate()

    def resize_kv_cache(self, max_total_sequence_length: int) -> None:
        """Make the KV cache anew for so many tokens of all requests together; the weights are not loaded again.

        One request can have no more tokens than when the engine was made.

        Raises
        ------
        BadRequestError
            Requests are in flight, or the number is one that this engine cannot have.
        OutOfMemoryError
            It does not fit; the message says what would. The old cache stays.
        EngineTerminatedError
            The engine was terminated.
        """
        self.core.resize_kv_cache(max_total_sequence_length)

    def _check_chat(self, fields: dict[str, Any], extra_body: object) -> ChatCompletionRequest:
        _ = self.core.model  # a terminated engine says so
        return prepare.chat_request(prepare.request_fields(fields, extra_body), self._model_names)

    def _prepare_chat(
        self, request: ChatCompletionRequest, request_id: object
    ) -> PreparedRequest[ChatCompletionChunk, ChatCompletionResponse]:
        """Render, encode and compile; from any thread."""
        model = self.core.model
        tool_use = plan_tool_use(model, request)
        limit = self.core.max_sequence_length
        generation = prepare.prepare_chat(model, request, request_id, tool_use, max_tokens=limit)
        return PreparedRequest(generation, ChatResponder(request, generation, model, tool_use))

    def _check_completion(self, fields: dict[str, Any], extra_body: object) -> CompletionRequest:
        _ = self.core.model  # a terminated engine says so
        return prepare.completion_request(prepare.request_fields(fields, extra_body), self._model_names)

    def _prepare_completion(
        self, request: CompletionRequest, request_id: object
    ) -> PreparedRequest[CompletionResponse, CompletionResponse]:
        """Encode and compile; from any thread."""
        model = self.core.model
        limit = self.core.max_sequence_length
        generation = prepare.prepare_completion(model, request, request_id, max_tokens=limit)
        prompt = request.prompt
        prompt_text = ""
        if request.echo:
            prompt_text = (
                prompt if isinstance(prompt, str) else model.tokenizer.decode(list(prompt), skip_special_tokens=False)
            )
        return PreparedRequest(generation, CompletionResponder(request, generation, model, prompt_text))


def _drop(core: EngineCore, process_id: int) -> None:
    """Count a handle less that was collected; it may be any thread that this happens on, so nothing waits."""
    if os.getpid() == process_id and core.holders.remove(released=False):
        core.begin_terminate()


def _as_text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise BadRequestError(f"{name} must be a name or a path, got {short_repr(value)}.")
    text = os.fsdecode(value)
    try:
        is_possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise BadRequestError(
            f"{name} is {short_repr(text)}, which no file and no model can be called: it holds a NUL character or a "
            "lone surrogate."
        )
    return text


class ChunkStream(Generic[ChunkT]):
    """The chunks of one answer, to iterate over once.

    Leaving it early (``close``, the end of a ``with`` block, dropping it, Ctrl-C) aborts the request. Several threads
    may read from it; each chunk goes to one of them.
    """

    def __init__(self, engine: EngineHandle, deltas: RequestStream, responder: Responder[ChunkT, object]) -> None:
        self._engine = engine  # its user may keep the stream alone
        self._deltas = deltas
        self._responder = responder
        self._ready: list[ChunkT] = []
        self._lock = threading.Lock()

    @property
    def request_id(self) -> str:
        """The id to give to ``engine.abort``."""
        return self._deltas.request_id

    def __iter__(self) -> ChunkStream[ChunkT]:
        return self

    def __next__(self) -> ChunkT:
        with self._lock:
            try:
                while not self._ready:
                    self._ready = self._responder.chunks(next(self._deltas))
                return self._ready.pop(0)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Abort the request unless it has ended, and end the stream."""
        self._deltas.close()
        self._ready = []

    def __enter__(self) -> ChunkStream[ChunkT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncChunkStream(Generic[ChunkT]):
    """The chunks of one answer, for one ``async for``; leaving it early or cancelling its task aborts the request."""

    def __init__(self, engine: EngineHandle, deltas: RequestStream, responder: Responder[ChunkT, object]) -> None:
        self._engine = engine  # its user may keep the stream alone
        self._deltas = deltas
        self._responder = responder
        self._ready: list[ChunkT] = []

    @property
    def request_id(self) -> str:
        """The id to give to ``engine.abort``."""
        return self._deltas.request_id

    def __aiter__(self) -> AsyncChunkStream[ChunkT]:
        return self

    async def __anext__(self) -> ChunkT:
        while not self._ready:
            self._ready = self._responder.chunks(await anext(self._deltas))
        return self._ready.pop(0)

    async def aclose(self) -> None:
        """Abort the request unless it has ended, and end the stream."""
        self._deltas.close()
        self._ready = []

    async def __aenter__(self) -> AsyncChunkStream[ChunkT]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
