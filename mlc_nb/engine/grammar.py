"""Structured output: which tokens a grammar allows next. A facade over ``llguidance``."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc_nb.engine.bounded_json import ANY_OBJECT, with_bounded_numbers
from mlc_nb.engine.token_bytes import TokenBytes
from mlc_nb.errors import BadRequestError, MLCError

if TYPE_CHECKING:
    import numpy.typing as npt

    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.protocol.response_format import GrammarSource

__all__ = ["JSON_OPTIONS", "GrammarCompiler", "GrammarConstraint"]

JSON_OPTIONS: dict[str, Any] = {
    # At most one space after a comma or a colon and none elsewhere: a model cannot fill its answer with white space.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    # What the schema says holds, or the request is refused: nothing is quietly left out or widened.
    "lenient": False,
    "coerce_one_of": False,
}
"""How JSON is written; it overrides what a schema says under ``x-guidance``."""

_MAX_MESSAGE = 400


class GrammarConstraint:
    """Where one answer is in its grammar. It belongs to one sequence, and to one thread at a time.

    Parameters
    ----------
    matcher
        An ``llguidance.LLMatcher`` without errors.
    vocab_size
        Entries of a mask.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype="<u4")

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, bool ``[vocab_size]``; stop tokens only where the answer may end.

        Raises
        ------
        MLCError
            The grammar exceeds the limits of one step, or cannot be finished.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on by a token that was allowed.

        Raises
        ------
        MLCError
            It was not allowed, or the grammar exceeds the limits of one step.
        """
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_finished(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def fork(self) -> GrammarConstraint:
        """Return an independent constraint at the same place."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MLCError(f"The answer cannot go on within its grammar: {_first_line(self._matcher.get_error())}.")


class GrammarCompiler:
    """Makes constraints for one model; safe to call from any thread.

    Its view of the vocabulary is made at the first use, which takes about 10 microseconds a token.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, model: LoadedModel, source: GrammarSource) -> GrammarConstraint:
        """Compile a schema, expression or grammar; it runs on the caller's thread, without the GIL.

        Raises
        ------
        BadRequestError
            It does not parse, uses what is not supported, cannot be satisfied, or exceeds the limits.
        """
        import llguidance

        matcher: Any = llguidance.LLMatcher
        try:
            if source.kind in ("json_object", "json_schema"):
                grammar = matcher.grammar_from_json_schema(_schema(source), overrides=JSON_OPTIONS)
            elif source.kind == "regex":
                grammar = matcher.grammar_from_regex(source.text)
            else:
                grammar = matcher.grammar_from_lark(source.text)
        except ValueError as error:  # such as a lone surrogate, or JSON that is nested too deeply
            raise _refusal(source, str(error)) from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        compiled = matcher(self._vocabulary_of(model, llguidance), grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise _refusal(source, compiled.get_error())
        constraint = GrammarConstraint(compiled, model.vocab_size)
        try:
            possible = bool(constraint.allowed().any())
        except MLCError:
            possible = False
        if not possible:
            raise _refusal(source, compiled.get_error() or "no text matches it")
        return constraint

    def _vocabulary_of(self, model: LoadedModel, llguidance: Any) -> Any:
        with self._lock:
            if self._vocabulary is None:
                if not model.stop_token_ids:
                    raise BadRequestError(
                        f"Invalid request: response_format needs a model with an end-of-text token, and "
                        f"{model.model_id} has none."
                    )
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Vocabulary(model)),
                    n_vocab=model.vocab_size,
                    eos_token=sorted(model.stop_token_ids),
                )
            return self._vocabulary


class _Vocabulary:
    """What ``llguidance.TokenizerWrapper`` asks of a tokenizer."""

    def __init__(self, model: LoadedModel) -> None:
        self._tokenizer = model.tokenizer
        token_bytes = TokenBytes(model.tokenizer)
        self.eos_token_id = min(model.stop_token_ids)
        self.bos_token_id = model.bos_token_id
        self.tokens = [token_bytes.of_any(token_id) for token_id in range(model.vocab_size)]
        special = {i for i, token in model.tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_token_ids = sorted(special | model.stop_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _schema(source: GrammarSource) -> str:
    try:
        schema = ANY_OBJECT if source.kind == "json_object" else json.loads(source.text)
        return json.dumps(with_bounded_numbers(schema))
    except RecursionError:
        raise _refusal(source, "it is nested too deeply") from None


def _refusal(source: GrammarSource, problem: str) -> BadRequestError:
    if "NoExtensionBias" in problem:
        problem = "no text matches it"
    hint = ""
    if "coerce_one_of" in problem:
        problem, hint = "oneOf with alternatives that may overlap is not supported", ": write anyOf"
    elif problem.startswith("Unimplemented keys"):
        hint = ": leave out what is not supported, and check it in the answer"
    return BadRequestError(f"Invalid request: {source.field} cannot be used: {_first_line(problem)}{hint}.")


def _first_line(problem: str) -> str:
    lines = [line.strip() for line in problem.replace("<non-verbose/>", "").splitlines()]
    return " ".join(line for line in lines if line)[:_MAX_MESSAGE].rstrip(".")
