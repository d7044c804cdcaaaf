"""The engines that the magics of one shell use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb import registry

if TYPE_CHECKING:
    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.notebook.settings import MLCMagics
    from mlc_nb.notebook.stream_view import StreamView

__all__ = ["CellEngines"]


class CellEngines:
    """Loads engines as the settings say, and holds them, so that no ``with`` block of a cell ends them."""

    def __init__(self, settings: MLCMagics) -> None:
        self._settings = settings
        self._held: dict[str, MLCEngine] = {}

    def get(self, model: str, view: StreamView) -> MLCEngine:
        """Return the engine of ``model``; ``view`` says so where it has to be loaded.

        Raises
        ------
        MLCError
            As `mlc_nb.get_engine`.
        """
        if not registry.is_loaded(model):
            view.wait_for(f"loading {model} …")
        engine = registry.get_engine(model, **self._settings.engine_arguments())
        self._held[registry.model_key(model)] = engine
        return engine
