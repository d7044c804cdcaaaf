"""From an OpenAI-shaped request to prompt tokens and a generation request."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlc_nb.engine.choices import choice_seed
from mlc_nb.engine.encoding import encode_text
from mlc_nb.engine.generation import GenerationRequest
from mlc_nb.engine.tool_use import messages_for_template
from mlc_nb.errors import BadRequestError, OutOfMemoryError
from mlc_nb.protocol.chat import ChatCompletionRequest
from mlc_nb.protocol.common import short_repr, validate
from mlc_nb.protocol.completions import CompletionRequest
from mlc_nb.protocol.refusals import shortened
from mlc_nb.runtime.sampler import SamplingState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlc_nb.engine.grammar import GrammarConstraint
    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.engine.tool_use import ToolUse
    from mlc_nb.protocol.response_format import GrammarSource
    from mlc_nb.protocol.sampling import GenerationFields

__all__ = ["chat_request", "completion_request", "prepare_chat", "prepare_completion", "request_fields"]

MAX_REQUEST_ID = 256


def request_fields(fields: Mapping[str, Any], extra_body: object) -> dict[str, Any]:
    """Join the keyword arguments of a ``create`` call with its ``extra_body``.

    Raises
    ------
    BadRequestError
        ``extra_body`` is no mapping or repeats an argument.
    """
    if extra_body is None:
        return dict(fields)
    if not isinstance(extra_body, Mapping):
        raise BadRequestError(f"Invalid request: extra_body must be a dict of fields, got {short_repr(extra_body)}.")
    twice = sorted(str(name) for name in extra_body if name in fields)
    if twice:
        raise BadRequestError(f"Invalid request: {', '.join(twice)} is given twice, also in extra_body.")
    return {**fields, **extra_body}


def chat_request(fields: Mapping[str, Any], model_names: frozenset[str]) -> ChatCompletionRequest:
    """Check the fields of a chat request; raises BadRequestError."""
    request = validate(ChatCompletionRequest, fields, subject="chat request")
    _check_model_name(request, model_names)
    return request


def completion_request(fields: Mapping[str, Any], model_names: frozenset[str]) -> CompletionRequest:
    """Check the fields of a completion request; raises BadRequestError."""
    request = validate(CompletionRequest, fields, subject="completion request")
    _check_model_name(request, model_names)
    return request


def prepare_chat(
    model: LoadedModel,
    request: ChatCompletionRequest,
    request_id: object = None,
    tool_use: ToolUse | None = None,
    *,
    max_tokens: int,
) -> GenerationRequest:
    """Render the messages with the model's template and encode them.

    Parameters
    ----------
    max_tokens
        Most tokens that prompt and answer can have together.

    Raises
    ------
    BadRequestError
        The model has no chat template, the template refuses the messages, or a field does not suit the model.
    """
    if model.chat_template is None:
        raise BadRequestError(
            f"The model {model.model_id} has no chat template, so it cannot chat: use completions.create(prompt=...)."
        )
    rendered = model.chat_template.render(
        messages_for_template(request, model), tools=None if tool_use is None else tool_use.for_template()
    )
    grammar = request.grammar if tool_use is None else tool_use.grammar
    token_ids = encode_text(model.tokenizer, rendered, max_tokens=max_tokens)
    if model.add_bos and model.bos_token_id is not None and token_ids[:1] != [model.bos_token_id]:
        token_ids = [model.bos_token_id, *token_ids]
    samplings = _samplings(
        model, request, grammar, logprobs=bool(request.logprobs), top_logprobs=request.top_logprobs or 0
    )
    return GenerationRequest(
        request_id=_request_id(request_id, "chatcmpl"),
        prompt_token_ids=_checked_prompt(model, token_ids, "messages"),
        sampling=samplings[0],
        more_choices=samplings[1:],
        max_tokens=request.token_limit,
        stop_strings=request.stop,
        stop_token_ids=_stop_token_ids(model, request, grammar),
        shown_token_ids=frozenset() if tool_use is None else tool_use.shown_token_ids,
    )


def prepare_completion(
    model: LoadedModel, request: CompletionRequest, request_id: object = None, *, max_tokens: int
) -> GenerationRequest:
    """Encode the prompt as it is, with no BOS token in front.

    Raises
    ------
    BadRequestError
        A field does not suit the model, such as a token id that is not in its vocabulary.
    """
    prompt = request.prompt
    if isinstance(prompt, tuple):
        token_ids: tuple[int, ...] | list[int] = prompt
    else:
        token_ids = encode_text(model.tokenizer, prompt, max_tokens=max_tokens)
    samplings = _samplings(
        model,
        request,
        request.grammar,
        # The best answers are told by their log probabilities.
        logprobs=request.logprobs is not None or request.num_generated > request.num_choices,
        top_logprobs=request.logprobs or 0,
    )
    return GenerationRequest(
        request_id=_request_id(request_id, "cmpl"),
        prompt_token_ids=_checked_prompt(model, token_ids, "prompt"),
        sampling=samplings[0],
        more_choices=samplings[1:],
        max_tokens=request.max_tokens,
        stop_strings=request.stop,
        stop_token_ids=_stop_token_ids(model, request, request.grammar),
        continues_text=True,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def _check_model_name(request: GenerationFields, model_names: frozenset[str]) -> None:
    if request.model is not None and request.model not in model_names:
        raise BadRequestError(
            f"Invalid request: model is {shortened(request.model)!r}, but this engine's is "
            f"{' or '.join(sorted(map(repr, model_names)))}: leave model out, or make an engine for the other model."
        )


def _request_id(given: object, prefix: str) -> str:
    if given is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if not isinstance(given, str) or not given:
        raise BadRequestError(f"Invalid request: request_id must be a string, got {short_repr(given)}.")
    if not given.isprintable() or len(given) > MAX_REQUEST_ID:
        raise BadRequestError(
            f"Invalid request: request_id must have at most {MAX_REQUEST_ID} printable characters, got "
            f"{short_repr(given)}."
        )
    return given


def _checked_prompt(model: LoadedModel, token_ids: list[int] | tuple[int, ...], field: str) -> tuple[int, ...]:
    if not token_ids:
        raise BadRequestError(f"Invalid request: {field} encodes to no tokens at all: give some text.")
    if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
        index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < model.vocab_size)
        raise BadRequestError(
            f"Invalid request: {field}[{index}] is the token id {short_repr(token_id)}, but the vocabulary of "
            f"{model.model_id} has the ids 0 to {model.vocab_size - 1}."
        )
    return tuple(token_ids)


def _samplings(
    model: LoadedModel, request: GenerationFields, grammar: GrammarSource | None, *, logprobs: bool, top_logprobs: int
) -> tuple[SamplingState, ...]:
    """The sampling of each answer."""
    unknown = [token_id for token_id in request.logit_bias if token_id >= model.vocab_size]
    if unknown:
        raise BadRequestError(
            f"Invalid request: logit_bias names the token id {unknown[0]}, but the vocabulary of {model.model_id} has "
            f"the ids 0 to {model.vocab_size - 1}."
        )
    constraint = None if grammar is None else model.grammars.compile(model, grammar)
    try:
        return tuple(_sampling_states(request, constraint, logprobs=logprobs, top_logprobs=top_logprobs))
    except MemoryError as error:
        raise OutOfMemoryError(f"There is no memory for a request's sampling ({error}): free some.") from error


def _sampling_states(
    request: GenerationFields, constraint: GrammarConstraint | None, *, logprobs: bool, top_logprobs: int
) -> Iterator[SamplingState]:
    for index in range(request.num_generated):
        yield SamplingState(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            logit_bias=request.logit_bias,
            seed=choice_seed(request.seed, index),
            constraint=None if constraint is None else constraint.fork(),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )


def _stop_token_ids(model: LoadedModel, request: GenerationFields, grammar: GrammarSource | None) -> frozenset[int]:
    # Within a grammar, stop tokens are allowed only where the answer may end.
    return frozenset() if request.ignores_eos and grammar is None else model.stop_token_ids
