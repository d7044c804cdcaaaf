"""``mlc-nb compile``: model libraries made ahead of time."""

from __future__ import annotations

import re
from pathlib import Path

from mlc_nb.engine.model import compile_request
from mlc_nb.errors import BadRequestError
from mlc_nb.library import compile_bundle, open_bundle
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.isa import host_isa, known_isas
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.source import DEFAULT_MODEL, resolve_model

__all__ = ["compile_model"]


def compile_model(
    model: str | None, isa: str | None, all_levels: bool, activation_dtype: str, output: str | None
) -> int:
    """Compile the library of a model, into the cache or a folder.

    Parameters
    ----------
    model
        None takes the default model.
    isa
        Processor level, or the architecture of an NVIDIA GPU such as ``sm_90``, which need not be here; None takes the
        best level of this machine.
    all_levels
        Compile for every level of this kind of processor instead.
    activation_dtype
        As in `EngineConfig`.
    output
        A folder that does not exist yet; None writes to the cache, where what is there already is not made again.

    Returns
    -------
    int
        The exit code.

    Raises
    ------
    BadRequestError
        The level or the type is unknown, or the folder exists.
    MLCError
        The model cannot be found or read, or the compiler failed.
    """
    if isa is not None and isa not in known_isas() and not re.fullmatch(r"sm_\d{2,3}", isa):
        raise BadRequestError(
            f"--isa {isa} is no level of this kind of processor; known: {', '.join(known_isas())}, and for GPUs "
            "of NVIDIA sm_75 or newer."
        )
    if output is not None and Path(output).exists():
        raise BadRequestError(f"{output} exists: give a folder that does not, or remove it first.")
    config = EngineConfig(activation_dtype=activation_dtype)
    source = resolve_model(model or DEFAULT_MODEL)
    with GGUFFile.open(source.path) as file:
        for level in known_isas() if all_levels else (isa or host_isa(),):
            request = compile_request(file, config, level)
            if output is None:
                place = open_bundle(request).directory
            else:
                place = Path(output)
                compile_bundle(request, place)
            print(f"{source.model_id} for {level}: {place}", flush=True)
    return 0
