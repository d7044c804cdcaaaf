"""Run large language models inside the notebook kernel.

    from mlc_nb import MLCEngine

    with MLCEngine() as engine:
        for chunk in engine.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], stream=True):
            ...

In a notebook, ``%load_ext mlc_nb`` adds ``%%mlc_chat`` and its companions. Everything below is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.admission import configure_memory
    from mlc_nb.batch.run import batch
    from mlc_nb.engine.async_engine import AsyncMLCEngine
    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.errors import (
        BadRequestError,
        CompileError,
        DeviceUnavailableError,
        EngineTerminatedError,
        MLCError,
        ModelFormatError,
        ModelNotFoundError,
        OutOfMemoryError,
        RequestAborted,
        WeightIntegrityError,
    )
    from mlc_nb.notebook.logprob_view import show_logprobs
    from mlc_nb.notebook.nesting import allow_nested
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.registry import engines, get_engine, unload

__version__ = "0.1.0"

__all__ = [
    "AsyncMLCEngine",
    "BadRequestError",
    "CompileError",
    "DeviceUnavailableError",
    "EngineConfig",
    "EngineTerminatedError",
    "MLCEngine",
    "MLCError",
    "ModelFormatError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "RequestAborted",
    "WeightIntegrityError",
    "__version__",
    "allow_nested",
    "batch",
    "configure_memory",
    "engines",
    "get_engine",
    "show_logprobs",
    "unload",
]

_HOME_OF_NAME = {
    "AsyncMLCEngine": "mlc_nb.engine.async_engine",
    "EngineConfig": "mlc_nb.protocol.engine_config",
    "MLCEngine": "mlc_nb.engine.engine",
    "allow_nested": "mlc_nb.notebook.nesting",
    "configure_memory": "mlc_nb.admission",
    "engines": "mlc_nb.registry",
    "get_engine": "mlc_nb.registry",
    "show_logprobs": "mlc_nb.notebook.logprob_view",
    "unload": "mlc_nb.registry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mlc_nb' has no attribute {name!r}")
    if name in ("MLCEngine", "AsyncMLCEngine"):
        # Engines that are built directly get their core from the registry as well.
        importlib.import_module("mlc_nb.registry")
    if name == "batch":
        return importlib.import_module("mlc_nb.batch")  # a package that can be called
    value = getattr(importlib.import_module(_HOME_OF_NAME.get(name, "mlc_nb.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magics to a notebook or an IPython terminal (``%load_ext mlc_nb``); a second load changes nothing."""
    from mlc_nb.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Undo `load_ipython_extension` (``%unload_ext mlc_nb``); engines stay loaded."""
    from mlc_nb.notebook.extension import unload

    unload(shell)
