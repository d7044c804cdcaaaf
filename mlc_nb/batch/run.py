"""Many chat requests on one engine, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlc_nb.batch.result import BatchItem, BatchResult
from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.errors import BadRequestError
from mlc_nb.progress import item_bar
from mlc_nb.protocol.common import short_repr

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["batch"]


async def batch(
    requests: Iterable[Any],
    *,
    model: str | os.PathLike[str] | None = None,
    engine: AsyncMLCEngine | None = None,
    system: str | None = None,
    concurrency: int | None = None,
    progress: bool = True,
    on_item: Callable[[BatchItem], None] | None = None,
    **fields: Any,
) -> BatchResult:
    """Answer many requests; a request that fails is an item with its error and does not end the others.

    Parameters
    ----------
    requests
        Each a prompt, a list of messages, or a dict of fields of `ChatCompletionRequest`, which go before ``fields``.
    model
        As `AsyncMLCEngine` takes it. Loading it waits, as making any engine does.
    engine
        An engine to use instead of ``model``; it stays open.
    system
        System prompt of requests that are a prompt alone.
    concurrency
        Most requests at a time; None takes as many as the engine runs at once.
    progress
        Whether to show a bar where it takes longer than a moment.
    on_item
        Called in the event loop with each item as soon as it is there.
    fields
        Fields of `ChatCompletionRequest` for all requests, such as ``max_tokens``.

    Returns
    -------
    BatchResult
        An item for each request, in their order.

    Raises
    ------
    BadRequestError
        An argument is invalid; what is wrong with a request is in its item.
    MLCError
        The model cannot be loaded.

    Examples
    --------
    >>> result = await mlc_nb.batch(["Capital of France?", "Capital of Italy?"], max_tokens=20, temperature=0)
    >>> result.texts
    """
    asked = list(_checked(requests))
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise BadRequestError(f"concurrency must be a whole number from 1, got {short_repr(concurrency)}.")
    if engine is not None and model is not None:
        raise BadRequestError("batch takes a model or an engine, not both.")
    if engine is not None and not isinstance(engine, AsyncMLCEngine):
        raise BadRequestError(f"engine must be an AsyncMLCEngine, got {type(engine).__name__}.")
    started = perf_counter()
    if not asked:
        return BatchResult((), 0.0)
    async with AsyncMLCEngine(model) if engine is None else nullcontext(engine) as used:
        limit = min(concurrency or used.config.num_sequences, len(asked))
        items: list[BatchItem | None] = [None] * len(asked)
        line = iter(enumerate(asked))
        with item_bar("Answering", total=len(asked), enabled=progress) as advance:

            async def work() -> None:
                for index, request in line:
                    item = items[index] = await _answer(used, index, request, system, fields)
                    advance()
                    if on_item is not None:
                        on_item(item)

            await _all_or_none([asyncio.ensure_future(work()) for _ in range(limit)])
    return BatchResult((item for item in items if item is not None), perf_counter() - started)


def _checked(requests: Iterable[Any]) -> Iterator[Any]:
    # A single prompt is iterable as well: each of its characters would be a request.
    if isinstance(requests, str | bytes | Mapping) or not hasattr(requests, "__iter__"):
        raise BadRequestError(f"requests must be a list of prompts or of requests, got {short_repr(requests)}.")
    return iter(requests)


async def _all_or_none(tasks: list[asyncio.Future[None]]) -> None:
    """Wait for all tasks; where one raises or this call is cancelled, the others are cancelled too."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _answer(
    engine: AsyncMLCEngine, index: int, request: Any, system: str | None, fields: Mapping[str, Any]
) -> BatchItem:
    try:
        response = await engine.chat.completions.create(**{**fields, **_fields_of(request, system), "stream": False})
    except Exception as error:  # whatever it is, the other requests go on
        return BatchItem(index, request, error=error)
    return BatchItem(index, request, response=response)


def _fields_of(request: Any, system: str | None) -> dict[str, Any]:
    if isinstance(request, str):
        before = [] if system is None else [{"role": "system", "content": system}]
        return {"messages": [*before, {"role": "user", "content": request}]}
    if isinstance(request, Mapping):
        return dict(request)
    if isinstance(request, list | tuple):
        return {"messages": list(request)}
    raise BadRequestError(
        f"a request must be a prompt, a list of messages or a dict of fields, got {short_repr(request)}."
    )
