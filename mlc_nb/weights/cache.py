"""The cache of model files: found intact, or written whole, once, whatever happens meanwhile.

Beside every file lies a manifest, ``<file>.json``, written after it. A file without its manifest, or one that does not
fit it, is damaged and is fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from mlc_nb.errors import MLCError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Manifest",
    "cache_root",
    "disk_errors",
    "disk_full",
    "exclusive",
    "intact",
    "read_manifest",
    "store",
    "work_directory",
]

_log = logging.getLogger(__name__)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORK_PREFIX = ".work-"


def cache_root() -> Path:
    """Return the folder of everything that mlc_nb caches: ``$MLC_NB_HOME``, else ``mlc_nb`` in the user's cache."""
    chosen = os.environ.get("MLC_NB_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlc_nb"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a cached file must be.

    Attributes
    ----------
    source
        The model id that the file was fetched for.
    size
        Bytes.
    sha256
        Hexadecimal digest.
    mtime_ns
        Time of the last change when the file was known to be good, in nanoseconds.
    only_of_its_name
        Whether no other file of its package has the same base name.
    """

    source: str
    size: int
    sha256: str
    mtime_ns: int
    only_of_its_name: bool


def _manifest_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def read_manifest(path: Path) -> Manifest | None:
    """Read the manifest of a cached file; None if it has none that can be read."""
    try:
        fields = json.loads(_manifest_path(path).read_text(encoding="utf-8"))
        manifest = Manifest(**fields)
    except (OSError, ValueError, TypeError):
        return None
    types = {name: type(value) for name, value in asdict(manifest).items()}
    expected = {"source": str, "size": int, "sha256": str, "mtime_ns": int, "only_of_its_name": bool}
    return manifest if types == expected else None


def intact(path: Path) -> bool:
    """Whether a file is cached and undamaged.

    Size and time are compared with the manifest; only where the time differs (a copied cache) is the file read and
    its hash compared. Needs no right to write.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    manifest = read_manifest(path)
    if manifest is None or status.st_size != manifest.size:
        _log.warning("The cached file %s is incomplete; it is fetched again.", path)
        return False
    if status.st_mtime_ns == manifest.mtime_ns:
        return True
    if _sha256(path) != manifest.sha256:
        _log.warning("The cached file %s is damaged; it is fetched again.", path)
        return False
    with contextlib.suppress(OSError):  # a read-only cache is hashed each time
        _write_manifest(path, Manifest(**{**asdict(manifest), "mtime_ns": status.st_mtime_ns}))
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def store(path: Path, blocks: Iterable[bytes], *, source: str, only_of_its_name: bool, work: Path) -> None:
    """Write a file and its manifest; whoever looks sees the whole file or none.

    Parameters
    ----------
    path
        Where the file belongs.
    blocks
        Its content; an exception that the iterable raises leaves nothing behind.
    source, only_of_its_name
        See `Manifest`.
    work
        Folder on the same file system, from `work_directory`.
    """
    partial, digest = work / uuid.uuid4().hex, hashlib.sha256()
    with partial.open("xb") as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    path.parent.mkdir(parents=True, exist_ok=True)
    _manifest_path(path).unlink(missing_ok=True)
    partial.replace(path)
    _sync_directory(path.parent)
    status = path.stat()
    _write_manifest(path, Manifest(source, status.st_size, digest.hexdigest(), status.st_mtime_ns, only_of_its_name))


def _write_manifest(path: Path, manifest: Manifest) -> None:
    final = _manifest_path(path)
    partial = final.with_name(f".{uuid.uuid4().hex}.json")
    try:
        partial.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(directory: Path, *, waiting: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Hold the lock of a folder of the cache, across threads and processes.

    Parameters
    ----------
    directory
        Made if it does not exist.
    waiting
        Entered while another holder is waited for, so that the user can be told.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / ".lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with waiting:
            lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def work_directory(directory: Path) -> Iterator[Path]:
    """Make a folder for unfinished files inside a locked folder of the cache; it is gone when the block ends.

    What a killed process left there goes as well: the holder of the lock is the only one at work.
    """
    for abandoned in directory.glob(_WORK_PREFIX + "*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    work = directory / (_WORK_PREFIX + uuid.uuid4().hex)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn failures to write into the cache into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise disk_full(directory) from error
        raise MLCError(
            f"The model cache cannot be written: {error}. Make {directory} writable, or set MLC_NB_HOME to a folder "
            "that is."
        ) from error


def disk_full(directory: Path) -> MLCError:
    """Make the error for a file system without room for a model."""
    place = next(parent for parent in (directory, *directory.parents) if parent.exists())
    return MLCError(
        f"There is no room for the model: the file system of {directory} has {shutil.disk_usage(place).free / 1e6:.0f} "
        "MB free. Free some, or set MLC_NB_HOME to a folder on another disk."
    )
