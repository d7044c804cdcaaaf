"""How an engine is set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from mlc_nb.errors import BadRequestError
from mlc_nb.protocol.common import MAX_INTEGER, StrictModel, TokenCount, as_bad_request, not_supported_yet, short_repr
from mlc_nb.protocol.refusals import shortened

__all__ = ["EngineConfig", "Mode", "ResolvedEngineConfig", "resolve_engine_config"]

Mode = Literal["local", "interactive", "server"]

_MAX_NUM_SEQUENCE: dict[str, int] = {"local": 4, "interactive": 1, "server": 32}
_PREFILL_CHUNK_SIZE = 2048


class EngineConfig(StrictModel):
    """Settings of an engine; None takes the value that the mode or the model gives.

    Attributes
    ----------
    model, model_lib, mode
        Same as the engine's arguments; where both are given they must be equal.
    kv_cache_page_size
        Tokens in a KV page; 16 is the only size.
    max_num_sequence
        Most requests that run at once; more wait in line. By mode: local 4, interactive 1, server 32.
    max_total_sequence_length
        Tokens that the KV pages of all requests together can hold.
    max_single_sequence_length
        Most tokens, prompt and answer together, in one request; at most the model's context window.
    prefill_chunk_size
        Most prompt tokens in one step; the engine takes fewer when they would hold up running answers.
        Default 2048.
    prefix_cache_mode
        ``"radix"`` keeps the KV pages of ended requests until others need them, and requests that begin with the same
        tokens share them; ``"disable"`` does not.
    prefix_cache_max_num_recycling_seqs
        Most ended sequences that the prefix cache keeps; 0 is the same as ``"disable"``. None and -1 set no limit but
        the pool: pages that are kept count as free, so a limit frees nothing.
    activation_dtype
        How products take their activations. On a CPU, where weights are quantized: ``"float32"`` keeps them as they
        are; ``"int16"`` gives the same answers faster; ``"int8"`` doubles the speed of prefill once more and may change
        a word here and there. On a GPU: ``"float16"``, or ``"bfloat16"`` where no weights are quantized. ``"auto"``
        takes what is best for the device.
    num_threads
        CPU threads of the model's kernels; None takes the physical cores that this process may use.
    pinned
        Keeps the engine from being unloaded to make room for another one, or for being idle.
    keep_alive
        Seconds after which the engine is unloaded if it has nothing to do; None takes what
        ``mlc_nb.configure_memory(keep_alive=...)`` says.
    """

    model: str | None = None
    model_lib: str | None = None
    mode: Mode | None = None
    kv_cache_page_size: Annotated[int, Field(ge=16, le=16)] = 16
    max_num_sequence: Annotated[int, Field(ge=1, le=256)] | None = None
    max_total_sequence_length: Annotated[int, Field(ge=16, le=MAX_INTEGER)] | None = None
    max_single_sequence_length: Annotated[int, Field(ge=2, le=MAX_INTEGER)] | None = None
    prefill_chunk_size: TokenCount | None = None
    prefix_cache_mode: Literal["radix", "disable"] = "radix"
    prefix_cache_max_num_recycling_seqs: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    activation_dtype: Literal["auto", "float32", "int16", "int8", "float16", "bfloat16"] = "auto"
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    pinned: bool = False
    keep_alive: Annotated[float, Field(ge=0)] | None = None

    additional_models: Annotated[None, not_supported_yet([])] = None
    tensor_parallel_shards: Annotated[None, not_supported_yet(1)] = None
    pipeline_parallel_stages: Annotated[None, not_supported_yet(1)] = None
    opt: Annotated[None, not_supported_yet()] = None
    gpu_memory_utilization: Annotated[None, not_supported_yet()] = None
    sliding_window_size: Annotated[None, not_supported_yet(-1)] = None
    attention_sink_size: Annotated[None, not_supported_yet(-1)] = None
    max_history_size: Annotated[None, not_supported_yet()] = None
    kv_state_kind: Annotated[None, not_supported_yet("kv_cache")] = None
    speculative_mode: Annotated[None, not_supported_yet("disable")] = None
    spec_draft_length: Annotated[None, not_supported_yet(0)] = None
    spec_tree_width: Annotated[None, not_supported_yet(1)] = None
    prefill_mode: Annotated[None, not_supported_yet("hybrid", "chunked")] = None
    verbose: Annotated[None, not_supported_yet(True, False)] = None

    def __init__(self, **fields: Any) -> None:
        """Check the fields.

        Raises
        ------
        BadRequestError
            A field is invalid or not supported yet; the message names it.
        """
        try:
            super().__init__(**fields)
        except ValidationError as error:
            refusal = as_bad_request(error, EngineConfig, fields, subject="engine_config")
        else:
            return
        raise refusal

    @property
    def num_sequences(self) -> int:
        """How many requests run at once, by ``max_num_sequence`` or the mode."""
        return self.max_num_sequence or _MAX_NUM_SEQUENCE[self.mode or "local"]

    @property
    def caches_prefixes(self) -> bool:
        """Whether ended requests leave their pages to later ones."""
        return self.prefix_cache_mode == "radix" and self.prefix_cache_max_num_recycling_seqs != 0

    @property
    def max_idle_sequences(self) -> int | None:
        """Most ended sequences whose pages are kept; None for no limit."""
        if not self.caches_prefixes:
            return 0
        limit = self.prefix_cache_max_num_recycling_seqs
        return None if limit == -1 else limit

    @property
    def prefill_chunk(self) -> int:
        """Most prompt tokens in one step, by ``prefill_chunk_size`` or the default."""
        return self.prefill_chunk_size or _PREFILL_CHUNK_SIZE


class ResolvedEngineConfig(EngineConfig):
    """The settings that an engine runs with: nothing is left open.

    Attributes
    ----------
    rules
        By the name of a field, the rule that bound its value.
    """

    rules: dict[str, str] = Field(default_factory=dict)

    def explain(self) -> str:
        """Return a line for each value that has a rule: the field, its value and what bound it."""
        return "\n".join(f"{name} = {getattr(self, name)!r}: {rule}" for name, rule in self.rules.items())


def resolve_engine_config(
    engine_config: EngineConfig | Mapping[str, Any] | None,
    *,
    model: str | None = None,
    model_lib: str | None = None,
    mode: str = "local",
) -> EngineConfig:
    """Check a configuration against the engine's arguments and fill in its model, library and mode.

    Raises
    ------
    BadRequestError
        A field is invalid or not supported yet, or differs from the argument of the same name.
    """
    if mode not in get_args(Mode):
        raise BadRequestError(f"mode must be one of {', '.join(get_args(Mode))}, got {short_repr(mode)}.")
    if engine_config is None:
        engine_config = EngineConfig()
    elif isinstance(engine_config, Mapping):
        engine_config = EngineConfig(**engine_config)
    elif not isinstance(engine_config, EngineConfig):
        raise BadRequestError(
            f"engine_config must be an EngineConfig or a dict of its fields, got {type(engine_config).__name__}."
        )
    arguments = {"model": model, "model_lib": model_lib, "mode": mode}
    for name, argument in arguments.items():
        configured = getattr(engine_config, name)
        # "local" is the argument's default: the configuration may then decide.
        is_default = argument is None or (name == "mode" and argument == "local")
        if configured is None:
            continue
        if not is_default and configured != argument:
            raise BadRequestError(
                f"engine_config.{name} is {shortened(configured)!r} but the engine's argument {name} is "
                f"{shortened(str(argument))!r}: "
                "give one of them, or the same value twice."
            )
        arguments[name] = configured
    return engine_config.model_copy(update=arguments)
