"""What the engine needs to know of a model: its tokenizer, its limits and how to open its runner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlc_nb.engine.grammar import GrammarCompiler
from mlc_nb.engine.limits import free_memory, resolve_limits, resolved_config
from mlc_nb.errors import DeviceUnavailableError, ModelFormatError
from mlc_nb.library import LibraryBundle, load_bundle, open_bundle
from mlc_nb.models.registry import architecture_module
from mlc_nb.progress import byte_bar
from mlc_nb.protocol.chat_template import ChatTemplate
from mlc_nb.runtime.cores import usable_cores
from mlc_nb.runtime.isa import host_isa, runnable_isas
from mlc_nb.runtime.model_runner import CpuModelRunner
from mlc_nb.runtime.parameters import load_parameters, rope_tables
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.gguf_tokenizer import load_tokenizer
from mlc_nb.weights.plan import CompileRequest
from mlc_nb.weights.source import resolve_model

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from tokenizers import Tokenizer

    from mlc_nb.protocol.engine_config import EngineConfig, ResolvedEngineConfig
    from mlc_nb.runtime.step import ModelRunner
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["LoadedModel", "compile_request", "load_model"]

DEFAULT_ACTIVATIONS = "int16"
"""What ``EngineConfig.activation_dtype`` "auto" means on a CPU: answers as in float32, from int8 instructions."""


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


def load_model(
    model: str | os.PathLike[str],
    *,
    device: str = "auto",
    model_lib: str | os.PathLike[str] | None = None,
    config: EngineConfig,
    progress: bool = True,
) -> LoadedModel:
    """Find a model, read and check it, and make sure that its compiled library is there.

    Parameters
    ----------
    model
        As `mlc_nb.weights.source.resolve_model` takes it.
    device
        ``auto`` or ``cpu``.
    model_lib
        A library bundle to use instead of the cached one.
    config
        Resolved settings of the engine.
    progress
        Whether to show progress bars for what takes time.

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
    if device not in ("auto", "cpu"):
        raise DeviceUnavailableError(f"device {device!r} is not supported yet; use 'cpu' or 'auto'")
    source = resolve_model(model, progress=progress)
    file = GGUFFile.open(source.path)
    try:
        architecture_module(file.architecture)
        vocabulary = load_tokenizer(file.metadata)
        bundle = _library(compile_request(file, config), model_lib, progress)
        limits = resolve_limits(bundle.metadata, config, free_memory())
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
            open_runner=_runner_opener(
                file, bundle, limits.single_sequence, limits.pages, config.num_threads, progress
            ),
            config=resolved_config(
                config,
                limits,
                activation_dtype=bundle.metadata.activation_dtype,
                num_threads=config.num_threads or usable_cores(),
            ),
        )
    except BaseException:
        file.close()
        raise


def compile_request(file: GGUFFile, config: EngineConfig, isa: str | None = None) -> CompileRequest:
    """Say what to compile for a model and a configuration; ``isa`` is the level, None takes that of this machine."""
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
        isa=isa or host_isa(),
        activation_dtype=DEFAULT_ACTIVATIONS if config.activation_dtype == "auto" else config.activation_dtype,
    )


def _library(request: CompileRequest, model_lib: str | os.PathLike[str] | None, progress: bool) -> LibraryBundle:
    if model_lib is None:
        return open_bundle(request, progress=progress)
    bundle = load_bundle(Path(model_lib))
    given = bundle.request
    if given.model_copy(update={"isa": request.isa}) != request:
        raise ModelFormatError(
            f"the library {model_lib} was compiled for another model or for other settings (activation_dtype "
            f"{given.activation_dtype}, wanted {request.activation_dtype}); leave model_lib out to have one compiled"
        )
    if given.isa not in runnable_isas():
        raise DeviceUnavailableError(
            f"the library {model_lib} was compiled for the ISA level {given.isa}; this processor can run: "
            f"{', '.join(runnable_isas())}"
        )
    return bundle


def _scheme(metadata: LibraryMetadata) -> str:
    """The block type of most of the weights."""
    sizes: Counter[str] = Counter()
    for matrix in metadata.matrices:
        sizes[matrix.block_type] += matrix.rows * matrix.columns
    return max(sizes, key=sizes.__getitem__, default="F32")


def _runner_opener(
    file: GGUFFile, bundle: LibraryBundle, positions: int, pages: int, num_threads: int | None, progress: bool
) -> Callable[[], ModelRunner]:
    def open_runner() -> CpuModelRunner:
        with file, byte_bar("Loading the weights", enabled=progress) as bar:
            parameters = load_parameters(bundle.metadata, file.tensors, bar.update)
            rope = rope_tables(bundle.metadata, file.tensors, positions)
        return CpuModelRunner(bundle, parameters, rope, num_pages=pages, num_threads=num_threads)

    return open_runner
