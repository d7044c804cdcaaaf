"""The engine for asyncio code: the surface of `MLCEngine` with ``await`` and ``async for``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from mlc_nb.engine.handle import AsyncChunkStream, EngineHandle

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from mlc_nb.engine.metrics import EngineMetrics
    from mlc_nb.protocol.chat import ChatCompletionChunk, ChatCompletionResponse
    from mlc_nb.protocol.completions import CompletionResponse
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.protocol.sampling import GenerationFields

__all__ = ["AsyncMLCEngine"]

RequestT = TypeVar("RequestT", bound="GenerationFields")
PreparedT = TypeVar("PreparedT")


class AsyncMLCEngine(EngineHandle):
    """Runs a language model in this process, for callers in any event loop, also in several at once.

    The constructor and `terminate` wait as those of `MLCEngine` do; a core that another engine of the same model and
    configuration has loaded is shared. A cancelled task aborts its request. The end of an ``async with`` block releases
    this engine alone (the model stays while others use it); `terminate` and `mlc_nb.unload` end it for everyone.

    Parameters
    ----------
    model
        An alias such as ``"smollm2"``, a ``PYPI://`` address or a path; None takes the default model.
    device
        ``"auto"`` (a GPU that can be used, else the CPU) or a device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
    model_lib
        A compiled library to use instead of the cached one.
    mode
        ``"local"`` (a few requests at once), ``"interactive"`` (one) or ``"server"`` (many).
    engine_config
        An `EngineConfig` or a dict of its fields.
    enable_tracing
        Not supported yet.

    Raises
    ------
    BadRequestError
        An argument or a field of ``engine_config`` is invalid; the message names it.
    MLCError
        The model cannot be found, read, compiled or held in memory.

    Examples
    --------
    >>> async with AsyncMLCEngine() as engine:
    ...     messages = [{"role": "user", "content": "Hi"}]
    ...     async for chunk in await engine.chat.completions.create(messages=messages, stream=True):
    ...         for choice in chunk.choices:
    ...             print(choice.delta.content, end="")
    """

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
        # Its own, so that Python names this class where an argument is unknown.
        super().__init__(
            model,
            device,
            model_lib=model_lib,
            mode=mode,
            engine_config=engine_config,
            enable_tracing=enable_tracing,
        )

    @property
    def chat(self) -> AsyncChat:
        """``chat.completions.create`` answers conversations."""
        return AsyncChat(self)

    @property
    def completions(self) -> AsyncCompletions:
        """``completions.create`` goes on from a prompt."""
        return AsyncCompletions(self)

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets RequestAborted. Does nothing where no such request is in flight."""
        _ = self.core.model  # a terminated engine says so
        self.core.abort(request_id)

    async def metrics(self) -> EngineMetrics:
        """Return counts and times since the engine was made or reset."""
        return self.core.metrics()

    async def reset(self) -> None:
        """Abort all requests in flight and set the metrics to zero."""
        await asyncio.to_thread(self.core.reset)

    async def __aenter__(self) -> AsyncMLCEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()


async def _off_loop(
    prepare: Callable[[RequestT, object], PreparedT], request: RequestT, request_id: object
) -> PreparedT:
    """Prepare a request, on another thread where it may take long, so that the event loop goes on."""
    if request.is_light:
        return prepare(request, request_id)
    return await asyncio.to_thread(prepare, request, request_id)


class AsyncChat:
    """``engine.chat``."""

    def __init__(self, engine: AsyncMLCEngine) -> None:
        self.completions = AsyncChatCompletions(engine)


class AsyncChatCompletions:
    """``engine.chat.completions``."""

    def __init__(self, engine: AsyncMLCEngine) -> None:
        self._engine = engine

    @overload
    async def create(
        self,
        *,
        stream: Literal[False] | None = ...,
        request_id: str | None = ...,
        extra_body: Mapping[str, Any] | None = ...,
        **fields: Any,
    ) -> ChatCompletionResponse: ...

    @overload
    async def create(
        self,
        *,
        stream: Literal[True],
        request_id: str | None = ...,
        extra_body: Mapping[str, Any] | None = ...,
        **fields: Any,
    ) -> AsyncChunkStream[ChatCompletionChunk]: ...

    async def create(
        self,
        *,
        stream: bool | None = None,
        request_id: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> ChatCompletionResponse | AsyncChunkStream[ChatCompletionChunk]:
        """Answer a conversation.

        Parameters
        ----------
        stream
            Return an iterator of chunks instead of the whole answer.
        request_id
            Becomes the response's id; for `AsyncMLCEngine.abort`.
        extra_body
            More fields, such as ``{"debug_config": {"ignore_eos": True}}``.
        fields
            ``messages`` and the other fields of `ChatCompletionRequest`.

        Raises
        ------
        BadRequestError
            A field is unknown, invalid or not supported yet, or the prompt is too long; the message names it.
        EngineTerminatedError, RequestAborted
            The engine or the request ended early.
        """
        request = self._engine._check_chat({"stream": stream, **fields}, extra_body)
        prepared = await _off_loop(self._engine._prepare_chat, request, request_id)
        deltas, responder = self._engine._submit(prepared.generation), prepared.responder
        if stream:
            return AsyncChunkStream(self._engine, deltas, responder)
        return responder.response([delta async for delta in deltas])


class AsyncCompletions:
    """``engine.completions``."""

    def __init__(self, engine: AsyncMLCEngine) -> None:
        self._engine = engine

    @overload
    async def create(
        self,
        *,
        stream: Literal[False] | None = ...,
        request_id: str | None = ...,
        extra_body: Mapping[str, Any] | None = ...,
        **fields: Any,
    ) -> CompletionResponse: ...

    @overload
    async def create(
        self,
        *,
        stream: Literal[True],
        request_id: str | None = ...,
        extra_body: Mapping[str, Any] | None = ...,
        **fields: Any,
    ) -> AsyncChunkStream[CompletionResponse]: ...

    async def create(
        self,
        *,
        stream: bool | None = None,
        request_id: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> CompletionResponse | AsyncChunkStream[CompletionResponse]:
        """Go on from a prompt.

        ``fields`` are those of `CompletionRequest`; the rest is as in ``chat.completions.create``.
        """
        request = self._engine._check_completion({"stream": stream, **fields}, extra_body)
        prepared = await _off_loop(self._engine._prepare_completion, request, request_id)
        deltas, responder = self._engine._submit(prepared.generation), prepared.responder
        if stream:
            return AsyncChunkStream(self._engine, deltas, responder)
        return responder.response([delta async for delta in deltas])
