"""``mlc-nb cache``: what lies in the cache of models and compiled libraries."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from typing import TYPE_CHECKING

from mlc_nb.errors import MLCError, ModelNotFoundError
from mlc_nb.inventory import cached_libraries, cached_models
from mlc_nb.weights.cache import cache_root, disk_errors, exclusive
from mlc_nb.weights.source import ALIASES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["list_cache", "remove"]


def list_cache() -> int:
    """Print what is cached.

    Raises
    ------
    MLCError
        There is no folder where the cache should be.
    """
    root = cache_root()
    if root.exists() and not root.is_dir():
        raise MLCError(f"The cache {root} is not a folder: remove the file, or set MLC_NB_HOME to a folder.")
    models, libraries = cached_models(), cached_libraries()
    print(f"cache: {cache_root()}")
    for model in models:
        print(f"{_megabytes(model.size)}  {f'{model.alias} = ' if model.alias else ''}{model.source}")
    total = sum(_size(library.rglob("*")) for library in libraries)
    print(f"{_megabytes(total)}  {len(libraries)} compiled librar{'y' if len(libraries) == 1 else 'ies'}")
    return 0


def remove(names: list[str], *, all_models: bool, libraries: bool) -> int:
    """Remove models by id or alias, all models, all libraries.

    Raises
    ------
    ModelNotFoundError
        A named model is not cached; nothing is removed then.
    """
    cached = cached_models()
    wanted = {ALIASES.get(name, name) for name in names}
    missing = wanted - {model.source for model in cached}
    if missing:
        known = ", ".join(model.alias or model.source for model in cached) or "none"
        raise ModelNotFoundError(f"Not cached: {', '.join(sorted(missing))}. Cached models: {known}.")
    with disk_errors(cache_root()):
        for model in cached:
            if all_models or model.source in wanted:
                with exclusive(_locked_folder(model.path), waiting=nullcontext()):
                    model.path.with_name(model.path.name + ".json").unlink(missing_ok=True)
                    model.path.unlink(missing_ok=True)
                print(f"removed {model.alias or model.source} ({_megabytes(model.size).strip()})")
        for library in cached_libraries() if libraries else ():
            with exclusive(library, waiting=nullcontext()):
                shutil.rmtree(library / "bundle")
            print(f"removed library {library.name}")
    return 0


def _locked_folder(path: Path) -> Path:
    """Return the folder whose lock guards a cached file: the release's, above the path inside the wheel."""
    return next((folder for folder in path.parents if (folder / ".lock").exists()), path.parent)


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:8.1f} MB"
