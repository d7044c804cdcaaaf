"""What the magics do where their options do not say: ``%config MLCMagics`` and ``%mlc_config``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traitlets import Dict, Enum, Float, Int, Unicode
from traitlets.config import Configurable

from mlc_nb.notebook.answer_format import FORMATS
from mlc_nb.weights.source import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SAMPLING_SETTINGS", "MLCMagics"]

SAMPLING_SETTINGS = ("max_tokens", "temperature", "top_p", "seed")
"""Settings that are fields of a request as well."""


class MLCMagics(Configurable):
    """Settings of the magics; an option of a magic goes before the setting of the same name."""

    model = Unicode(DEFAULT_MODEL, help="Model of the magics that are given none").tag(config=True)
    system = Unicode(None, allow_none=True, help="System prompt of conversations that have none").tag(config=True)
    max_tokens = Int(None, allow_none=True, min=1, help="Most tokens in an answer; None: what the context holds").tag(
        config=True
    )
    temperature = Float(None, allow_none=True, min=0.0, help="0 is always the likeliest token; None: 1").tag(
        config=True
    )
    top_p = Float(None, allow_none=True, min=0.0, max=1.0, help="Share of the likeliest tokens; None: all").tag(
        config=True
    )
    seed = Int(None, allow_none=True, help="Same seed, same answer; None: a new one each time").tag(config=True)
    format = Enum(FORMATS, "markdown", help=f"How answers are shown: {', '.join(FORMATS)}").tag(config=True)
    device = Unicode("auto", help="Device of engines that the magics load").tag(config=True)
    mode = Enum(
        ("local", "interactive", "server"), "local", help="How many requests run at once: 4, 1 or 32, one a mode"
    ).tag(config=True)
    engine_config = Dict(help="Further fields of EngineConfig for engines that the magics load").tag(config=True)

    def sampling(self, names: Iterable[str] = SAMPLING_SETTINGS) -> dict[str, Any]:
        """Return the request fields that are set here."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments of `mlc_nb.get_engine`, besides the model, for engines that the magics load."""
        return {"device": self.device, "mode": self.mode, "engine_config": dict(self.engine_config) or None}
