"""What lies in the cache: the models that were fetched, and the libraries that were compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlc_nb.library import library_root
from mlc_nb.weights.cache import cache_root, read_manifest
from mlc_nb.weights.source import ALIASES

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CachedModel", "cached_libraries", "cached_models"]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A weight file that was fetched.

    Attributes
    ----------
    source
        The id that fetches it.
    path
        Where it lies.
    size
        Bytes.
    """

    source: str
    path: Path
    size: int

    @property
    def alias(self) -> str | None:
        """Its short name."""
        return next((alias for alias, source in ALIASES.items() if source == self.source), None)


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, by id."""
    found = []
    for manifest_path in (cache_root() / "models").rglob("*.json"):
        path = manifest_path.with_suffix("")
        manifest = read_manifest(path)
        if manifest is not None and path.is_file():
            found.append(CachedModel(manifest.source, path, path.stat().st_size))
    return sorted(found, key=lambda model: model.source)


def cached_libraries() -> list[Path]:
    """Return the folders of the compiled libraries in the cache."""
    return sorted(path.parent for path in library_root().glob("*/bundle"))
