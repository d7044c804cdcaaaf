"""The table of models that can be named here."""

from __future__ import annotations

from mlc_nb import registry
from mlc_nb.inventory import cached_models
from mlc_nb.table import table_bundle
from mlc_nb.weights.source import ALIASES

__all__ = ["known_models", "models_bundle"]


def known_models() -> list[str]:
    """Return the names of models: aliases first, then what else is cached or loaded."""
    cached = [model.alias or model.source for model in cached_models()]
    loaded = [row.model for row in registry.engines()]
    return list(dict.fromkeys([*ALIASES, *cached, *loaded]))


def models_bundle() -> dict[str, str]:
    """Return the representations of the table of models by MIME type."""
    cached = {model.source: model for model in cached_models()}
    states = {registry.model_key(row.model): row.state for row in registry.engines()}
    rows = []
    for name in known_models():
        source = ALIASES.get(name, name)
        file = cached.get(source)
        state = states.get(registry.model_key(name)) or ("cached" if file is not None else "not fetched yet")
        size = f"{file.size / 1e6:.1f} MB" if file is not None else "-"
        rows.append((name, state, size, source))
    below = "Any of these names, or the path of a .gguf file, goes behind -m."
    return table_bundle(("model", "state", "size", "source"), rows, below=below)
