"""What the engine needs to know of a model: its tokenizer, its limits and how to open its runner."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlc_nb.engine.backends import activation_dtype_of, backend_of
from mlc_nb.engine.grammar import GrammarCompiler
from mlc_nb.engine.limits import resolve_limits, resolved_config
from mlc_nb.engine.room import WholeDevice
from mlc_nb.errors import ModelFormatError
from mlc_nb.library import LibraryBundle, load_bundle, open_bundle
from mlc_nb.models.registry import architecture_module
from mlc_nb.protocol.chat_template import ChatTemplate
from mlc_nb.runtime.cores import usable_cores
from mlc_nb.runtime.devices import resolve_device
from mlc_nb.runtime.isa import host_isa
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.gguf_tokenizer import load_tokenizer
from mlc_nb.weights.plan import CompileRequest
from mlc_nb.weights.source import resolve_model

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from tokenizers import Tokenizer

    from mlc_nb.engine.backends import Backend
    from mlc_nb.engine.limits import Limits
    from mlc_nb.engine.room import Room
    from mlc_nb.protocol.engine_config import EngineConfig, ResolvedEngineConfig
    from mlc_nb.runtime.step import ModelRunner
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["LoadedModel", "compile_request", "load_model"]


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
    scheme
        How most of its weights are stored, such as ``"Q4_1"``.
    open_runner
        Loads weights and library and makes the runner. Called once, on the engine thread.
    grammars
        Compiles grammars for the model's vocabulary.
    config
        The configuration with all values resolved, and why; None where the engine is to take its own as it is.
    resized
        Limits and configuration for another ``max_total_sequence_length``, as memory allows; None where the KV cache
        cannot be resized.
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
    scheme: str = ""
    grammars: GrammarCompiler = field(default_factory=GrammarCompiler, repr=False, compare=False)
    config: ResolvedEngineConfig | None = None
    resized: Callable[[int, Room], tuple[Limits, ResolvedEngineConfig]] | None = None


def load_model(
    model: str | os.PathLike[str],
    *,
    device: str = "auto",
    model_lib: str | os.PathLike[str] | None = None,
    config: EngineConfig,
    progress: bool = True,
    room: Room | None = None,
) -> LoadedModel:
    """Find a model, read and check it, and make sure that its compiled library is there.

    Parameters
    ----------
    model
        As `mlc_nb.weights.source.resolve_model` takes it.
    device
        As `mlc_nb.runtime.devices.resolve_device` takes it.
    model_lib
        A library bundle to use instead of the cached one.
    config
        Resolved settings of the engine.
    progress
        Whether to show progress bars for what takes time.
    room
        What of the device's memory the model may take; None takes what is free.

    Raises
    ------
    ModelNotFoundError, ModelFormatError, WeightIntegrityError
        The model or the library cannot be found or used.
    CompileError
        The library could not be compiled.
    DeviceUnavailableError
        There is no such device here.
    OutOfMemoryError
        The model does not fit in the free memory.
    """
    device = resolve_device(device)
    backend = backend_of(device)
    source = resolve_model(model, progress=progress)
    file = GGUFFile.open(source.path)
    try:
        architecture_module(file.architecture, for_cuda=device != "cpu")
        vocabulary = load_tokenizer(file.metadata)
        file.drop_arrays()
        bundle = _library(compile_request(file, config, backend.isa), model_lib, backend, progress)
        needs = backend.needs(bundle, config)
        limits = resolve_limits(bundle.metadata, config, needs, room or WholeDevice(device))
        num_threads = config.num_threads or usable_cores()
        activation_dtype = bundle.metadata.activation_dtype

        def resized(total: int, room: Room) -> tuple[Limits, ResolvedEngineConfig]:
            changed = config.model_copy(update={"max_total_sequence_length": total})
            limits = resolve_limits(bundle.metadata, changed, needs, room)
            resolved = resolved_config(changed, limits, activation_dtype=activation_dtype, num_threads=num_threads)
            return limits, resolved

        if vocabulary.tokenizer.get_vocab_size() > bundle.metadata.vocab_size:
            raise ModelFormatError(
                f"{source.path} has {vocabulary.tokenizer.get_vocab_size()} tokens but only "
                f"{bundle.metadata.vocab_size} rows of embeddings; the file is inconsistent"
            )
        template = vocabulary.chat_template
        return LoadedModel(
            model_id=source.model_id,
            tokenizer=vocabulary.tokenizer,
            chat_template=None
            if template is None
            else ChatTemplate(template, bos_token=vocabulary.bos_token, eos_token=vocabulary.eos_token),
            stop_token_ids=vocabulary.stop_token_ids,
            bos_token_id=vocabulary.bos_token_id,
            add_bos=vocabulary.add_bos,
            context_window_size=limits.single_sequence,
            vocab_size=bundle.metadata.vocab_size,
            scheme=_scheme(bundle.metadata),
            open_runner=functools.partial(backend.open_runner, file, bundle, limits, config, progress),
            config=resolved_config(
                config,
                limits,
                activation_dtype=activation_dtype,
                num_threads=num_threads,
            ),
            resized=resized,
        )
    except BaseException:
        file.close()
        raise


def compile_request(file: GGUFFile, config: EngineConfig, isa: str | None = None) -> CompileRequest:
    """Say what to compile for a model and a configuration.

    ``isa`` is the ISA level or the GPU's architecture; None takes the level of this machine.

    Raises
    ------
    BadRequestError
        The configuration asks for what the device does not have.
    """
    isa = isa or host_isa()
    prefix = f"{file.architecture}."
    hyperparameters = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix) and isinstance(value, int | float | str | bool)
    }
    return CompileRequest(
        architecture=file.architecture,
        hyperparameters=hyperparameters,
        tensors={name: (tensor.block_type, tensor.shape) for name, tensor in file.tensors.items()},
        isa=isa,
        activation_dtype=activation_dtype_of(config, file, isa),
    )


def _library(
    request: CompileRequest, model_lib: str | os.PathLike[str] | None, backend: Backend, progress: bool
) -> LibraryBundle:
    if model_lib is None:
        return open_bundle(request, progress=progress)
    bundle = load_bundle(Path(model_lib))
    given = bundle.request
    if given.model_copy(update={"isa": request.isa}) != request:
        raise ModelFormatError(
            f"the library {model_lib} was compiled for another model or for other settings (activation_dtype "
            f"{given.activation_dtype}, wanted {request.activation_dtype}); leave model_lib out to have one compiled"
        )
    backend.check(bundle)
    return bundle


def _scheme(metadata: LibraryMetadata) -> str:
    """The block type of most of the weights."""
    sizes: Counter[str] = Counter()
    for matrix in metadata.matrices:
        sizes[matrix.block_type] += matrix.rows * matrix.columns
    return max(sizes, key=sizes.__getitem__, default="F32")
