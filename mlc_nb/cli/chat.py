"""``mlc-nb chat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import BadRequestError, RequestAborted
from mlc_nb.registry import get_engine

if TYPE_CHECKING:
    from mlc_nb.engine.engine import MLCEngine

__all__ = ["chat"]


def chat(model: str | None, prompt: str | None, system: str | None, sampling: dict[str, Any]) -> int:
    """Answer one prompt, or hold a conversation on a terminal.

    Parameters
    ----------
    model
        None takes the default model.
    prompt
        The only prompt; None asks for prompts, or takes the whole standard input as one where it is no terminal.
    system
        System prompt.
    sampling
        Further fields of `ChatCompletionRequest`.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    MLCError
        The prompt is empty, the model cannot be loaded, or it refuses the request.
    KeyboardInterrupt
        Ctrl-C outside a conversation.
    """
    conversation = [] if system is None else [{"role": "system", "content": system}]
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise BadRequestError("The prompt is empty: give one with --prompt, or through a pipe.")
    with get_engine(model) as engine:
        if prompt is not None:
            _answer(engine, [*conversation, {"role": "user", "content": prompt}], sampling)
        else:
            _converse(engine, conversation, sampling)
    return 0


def _converse(engine: MLCEngine, conversation: list[dict[str, str]], sampling: dict[str, Any]) -> None:
    print("Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not prompt.strip():
            continue
        said: list[str] = []
        try:
            _answer(engine, [*conversation, {"role": "user", "content": prompt}], sampling, said)
        except KeyboardInterrupt:
            print(" [stopped]")
        except (BadRequestError, RequestAborted) as error:
            print(f"mlc-nb: {error}", file=sys.stderr)
            continue
        if said:
            conversation.append({"role": "user", "content": prompt})
            conversation.append({"role": "assistant", "content": "".join(said)})


def _answer(
    engine: MLCEngine, messages: list[dict[str, str]], sampling: dict[str, Any], said: list[str] | None = None
) -> None:
    """Print the answer while it comes, and keep its pieces in ``said``."""
    ended = True
    with engine.chat.completions.create(messages=messages, stream=True, **sampling) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                if choice.delta.content:
                    if said is not None:
                        said.append(choice.delta.content)
                    print(choice.delta.content, end="", flush=True)
                    ended = choice.delta.content.endswith("\n")
    if not ended:
        print()
