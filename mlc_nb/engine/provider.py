"""Where engines get their core from: a new one each, until the registry takes this over.

The registry keeps one core a model, and it imports the engine; so the engine asks here instead of importing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from mlc_nb.engine.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlc_nb.engine.room import Room
    from mlc_nb.protocol.engine_config import EngineConfig

__all__ = ["CoreProvider", "acquire_core", "create_core", "set_core_provider"]

CoreProvider: TypeAlias = "Callable[[str, str, str | None, EngineConfig], EngineCore]"


def create_core(
    model: str, device: str, model_lib: str | None, config: EngineConfig, room: Room | None = None
) -> EngineCore:
    """Load a model and start a core for it.

    Parameters
    ----------
    room
        What of the device's memory it may take; None takes what is free.

    Raises
    ------
    MLCError
        What was wrong with the model, the device or the configuration.
    """
    from mlc_nb.engine.model import load_model

    return EngineCore(load_model(model, device=device, model_lib=model_lib, config=config, room=room), config, room)


def acquire_core(model: str, device: str, model_lib: str | None, config: EngineConfig) -> EngineCore:
    """Return a ready core for a model; the mode is a part of ``config``. Raises what `create_core` raises."""
    return _provider(model, device, model_lib, config)


def set_core_provider(provider: CoreProvider) -> CoreProvider:
    """Let ``provider`` answer `acquire_core` from now on; return the one that did so before."""
    global _provider
    previous, _provider = _provider, provider
    return previous


_provider: CoreProvider = create_core
