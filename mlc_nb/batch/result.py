"""What a batch gives back: an item for each request, in the order of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from mlc_nb.table import one_line, table_bundle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlc_nb.protocol.chat import ChatCompletionResponse

__all__ = ["BatchItem", "BatchResult"]

_MOST_ROWS = 200


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request of a batch and what became of it: a response or an error.

    Attributes
    ----------
    index
        Its place among the requests.
    request
        As it was given.
    """

    index: int
    request: Any
    response: ChatCompletionResponse | None = None
    error: Exception | None = None

    @property
    def text(self) -> str | None:
        """The answer; None where there is none."""
        return None if self.response is None else self.response.choices[0].message.content or ""


class BatchResult(Sequence[BatchItem]):
    """The items of a batch.

    Parameters
    ----------
    items
        In the order of the requests.
    seconds
        From the first request to the last answer.
    """

    def __init__(self, items: Iterable[BatchItem], seconds: float) -> None:
        self._items = tuple(items)
        self.seconds = seconds

    @property
    def texts(self) -> list[str | None]:
        """The answers in order; None for a request that failed."""
        return [item.text for item in self._items]

    @property
    def errors(self) -> list[BatchItem]:
        """The items that failed."""
        return [item for item in self._items if item.error is not None]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(item.response.usage.completion_tokens for item in self._items if item.response is not None)

    def summary(self) -> str:
        """Return one line: requests, failures, tokens, tokens/s over all, seconds."""
        tokens = self.completion_tokens
        speed = f"{tokens / self.seconds:.1f} tokens/s" if self.seconds > 0 else ""
        failed = f"{len(self.errors)} failed" if self.errors else ""
        parts = (f"{len(self)} requests", failed, f"{tokens} tokens", speed, f"{self.seconds:.1f} s")
        return " · ".join(part for part in parts if part)

    @overload
    def __getitem__(self, index: int) -> BatchItem: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[BatchItem, ...]: ...

    def __getitem__(self, index: int | slice) -> BatchItem | tuple[BatchItem, ...]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<BatchResult: {self.summary()}>"

    def _repr_mimebundle_(self, **_selection: Any) -> dict[str, str]:
        headings = ("#", "request", "answer", "tokens")
        below = self.summary()
        if len(self) > _MOST_ROWS:
            below += f" · the first {_MOST_ROWS} are shown"
        rows = [_row(item) for item in self._items[:_MOST_ROWS]]
        short = [(number, one_line(asked, 40), one_line(answer, 70), tokens) for number, asked, answer, tokens in rows]
        return {
            "text/plain": table_bundle(headings, short, below=below)["text/plain"],
            "text/html": table_bundle(headings, rows, below=below)["text/html"],
        }


def _row(item: BatchItem) -> tuple[str, str, str, str]:
    if item.response is None:
        return str(item.index), _asked(item.request), f"{type(item.error).__name__}: {item.error}", "-"
    return str(item.index), _asked(item.request), item.text or "", str(item.response.usage.completion_tokens)


def _asked(request: Any) -> str:
    """Return the question of a request, in whatever form it was given."""
    messages = request.get("messages") if isinstance(request, dict) else request
    last = messages[-1] if isinstance(messages, list | tuple) and messages else request
    return str(last.get("content", last)) if isinstance(last, dict) else str(last)
