"""An answer token by token: each coloured by its probability, with the alternatives on hover."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.display import display

from mlc_nb.errors import BadRequestError
from mlc_nb.protocol.chat import ChatCompletionResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlc_nb.protocol.chat import TopLogprob
    from mlc_nb.protocol.completions import CompletionResponse

__all__ = ["LogprobView", "show_logprobs"]

_MARKS = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})
_LOW_PROBABILITY = 0.5


@dataclass(frozen=True, slots=True)
class _Token:
    """A token, its probability (None where it has none), and the likeliest ones in its place."""

    text: str
    probability: float | None
    alternatives: tuple[tuple[str, float], ...]


class LogprobView:
    """What `show_logprobs` displays."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens

    def __repr__(self) -> str:
        lines = [f"{'token':<20}{'probability':>12}  alternatives"]
        for token in self._tokens:
            probability = "-" if token.probability is None else f"{token.probability:.1%}"
            others = ", ".join(f"{_visible(text)} {share:.1%}" for text, share in token.alternatives)
            lines.append(f"{_visible(token.text):<20}{probability:>12}  {others}".rstrip())
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_selection: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._html()}

    def _html(self) -> str:
        spans = "".join(_span(token) for token in self._tokens)
        scale = "".join(
            f"<span style='{_style(share)}'>&nbsp;{share:.0%}&nbsp;</span>" for share in (1.0, 0.75, 0.5, 0.25, 0.05)
        )
        return (
            f"<div style='white-space: pre-wrap; line-height: 1.7'>{spans}</div>"
            f"<small>probability of each token: {scale} (hover for the alternatives)</small>"
        )


def show_logprobs(response: ChatCompletionResponse | CompletionResponse) -> None:
    """Show a response token by token, coloured by probability.

    Parameters
    ----------
    response
        Of a chat or a completion that asked for log probabilities, by a magic or from Python; its first answer is
        shown.

    Raises
    ------
    BadRequestError
        The response has no log probabilities.
    """
    tokens = list(_chat_tokens(response) if isinstance(response, ChatCompletionResponse) else _text_tokens(response))
    if not tokens:
        raise BadRequestError(
            "This response has no log probabilities: ask for them with `--logprobs 5` in the cell, or in Python with "
            "logprobs=True, top_logprobs=5 (chat) or logprobs=5 (completions)."
        )
    display(LogprobView(tokens))


def _chat_tokens(response: ChatCompletionResponse) -> Iterable[_Token]:
    logprobs = response.choices[0].logprobs
    for entry in (logprobs.content or ()) if logprobs is not None else ():
        top = tuple((_text(other), math.exp(other.logprob)) for other in entry.top_logprobs)
        yield _Token(_text(entry), math.exp(entry.logprob), top)


def _text(token: TopLogprob) -> str:
    """Return a token's text, or its bytes where they are only a part of a character."""
    return token.token if "\ufffd" not in token.token else "".join(f"\\x{byte:02x}" for byte in token.bytes or ())


def _text_tokens(response: CompletionResponse) -> Iterable[_Token]:
    logprobs = response.choices[0].logprobs
    if logprobs is None:
        return
    for text, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        others = tuple((other, math.exp(value)) for other, value in (top or {}).items())
        yield _Token(text, None if logprob is None else math.exp(logprob), others)


def _span(token: _Token) -> str:
    title = "" if token.probability is None else f"{_visible(token.text)}  {token.probability:.1%}"
    title += "".join(f"\n{_visible(text)}  {share:.1%}" for text, share in token.alternatives)
    style = "" if token.probability is None else _style(token.probability)
    return f'<span style="{style}" title="{html.escape(title)}">{html.escape(token.text)}</span>'


def _style(probability: float) -> str:
    """From red (unlikely) over yellow to green (certain), pale enough for dark and light text around it."""
    hue = round(120 * probability)
    underline = "; text-decoration: underline dotted" if probability < _LOW_PROBABILITY else ""
    return f"background: hsl({hue}, 75%, 80%); color: #111{underline}"


def _visible(text: str) -> str:
    return text.translate(_MARKS)
