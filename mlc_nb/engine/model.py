"""What the engine needs to know of a model: its tokenizer, its limits and how to open its runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

    from mlc_nb.protocol.chat_template import ChatTemplate
    from mlc_nb.runtime.step import ModelRunner

__all__ = ["LoadedModel"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is found, read and checked, but that holds no device memory yet.

    Attributes
    ----------
    model_id
        The name under which requests may ask for it.
    tokenizer
        Encodes without automatic special tokens; special-token text is parsed.
    chat_template
        The model's own template; None for a base model, which then refuses chat requests.
    stop_token_ids
        Ids that end an answer and never show in its text.
    bos_token_id, add_bos
        The id to put in front of a chat prompt when ``add_bos`` is set and the template has not written it.
    context_window_size
        Most tokens (prompt and answer together) in one sequence.
    vocab_size
        Ids are 0 to ``vocab_size - 1``.
    open_runner
        Loads weights and library and makes the runner. Called once, on the engine thread.
    """

    model_id: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    stop_token_ids: frozenset[int]
    bos_token_id: int | None
    add_bos: bool
    context_window_size: int
    vocab_size: int
    open_runner: Callable[[], ModelRunner]
