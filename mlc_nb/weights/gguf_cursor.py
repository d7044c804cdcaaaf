"""A reading position in a mapped GGUF file that never steps past the end and never trusts a length."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGUFValueType

from mlc_nb.errors import ModelFormatError

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

__all__ = ["GGUFCursor"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_NUMBERS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("<u1"),
}


class GGUFCursor:
    """Reads values of the GGUF format one after the other; every failure is a `ModelFormatError`.

    Attributes
    ----------
    mapping
        The whole file.
    path
        The file's path, for messages.
    position
        The byte that is read next.
    """

    def __init__(self, mapping: mmap.mmap, path: Path) -> None:
        self.mapping = mapping
        self.path = path
        self.position = 0
        self._size = len(mapping)

    def corrupt(self, what: str) -> ModelFormatError:
        """Make the error for a damaged file; ``what`` completes "the file is damaged: ..."."""
        return ModelFormatError(
            f"{self.path} is damaged: {what} (near byte {self.position}). Fetch or convert the file again."
        )

    def take(self, count: int, what: str) -> bytes:
        """Read ``count`` raw bytes of ``what``."""
        return self.mapping[self._advance(count, what) : self.position]

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        value: int = _U32.unpack_from(self.mapping, self._advance(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        value: int = _U64.unpack_from(self.mapping, self._advance(8, what))[0]
        return value

    def string(self, what: str, *, limit: int | None = None) -> str:
        """Read a string of at most ``limit`` bytes; null characters and invalid UTF-8 are refused."""
        length = self.u64(what)
        if limit is not None and length > limit:
            raise self.corrupt(f"{what} has {length} bytes, more than {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} is no valid UTF-8 text") from None

    def value(self, type_id: int, key: str) -> object:
        """Read a metadata value of the GGUF type ``type_id`` that belongs to ``key``."""
        kind = self._kind(type_id, key)
        if kind is GGUFValueType.STRING:
            return self.string(key)
        if kind is GGUFValueType.ARRAY:
            return self._array(key)
        numbers = self._numbers(kind, 1, key)
        value: object = numbers[0].item()
        return value

    def _array(self, key: str) -> object:
        kind = self._kind(self.u32(key), key)
        count = self.u64(key)
        if kind is GGUFValueType.ARRAY:
            raise self.corrupt(f"{key!r} is an array of arrays, which no model needs")
        if kind is GGUFValueType.STRING:
            return self._strings(count, key)
        return self._numbers(kind, count, key)

    def _numbers(self, kind: GGUFValueType, count: int, key: str) -> npt.NDArray[Any]:
        dtype = _NUMBERS[kind]
        start = self._advance(count * dtype.itemsize, key)
        numbers: npt.NDArray[Any] = np.frombuffer(self.mapping, dtype=dtype, count=count, offset=start).copy()
        if kind is not GGUFValueType.BOOL:
            return numbers
        if numbers.size and numbers.max() > 1:
            raise self.corrupt(f"{key!r} has a truth value other than 0 and 1")
        flags: npt.NDArray[np.bool_] = numbers.astype(np.bool_)
        return flags

    def _strings(self, count: int, key: str) -> list[str]:
        if count * 8 > self._size - self.position:
            raise self.corrupt(f"{key!r} claims {count} strings, more than the rest of the file can hold")
        # The vocabulary has 10**5 strings and more: this loop is spelled out because it decides how fast a file opens.
        mapping, position, size, length_at = self.mapping, self.position, self._size, _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                (length,) = length_at(mapping, position)
                end = position + 8 + length
                if end > size:
                    raise self.corrupt(f"{key!r} has a string that ends after the file")
                append(mapping[position + 8 : end].decode("utf-8"))
                position = end
        except struct.error:
            raise self.corrupt(f"the file ends inside {key!r}") from None
        except UnicodeDecodeError:
            raise self.corrupt(f"{key!r} has a string that is no valid UTF-8 text") from None
        self.position = position
        return strings

    def _kind(self, type_id: int, key: str) -> GGUFValueType:
        try:
            return GGUFValueType(type_id)
        except ValueError:
            raise self.corrupt(f"{key!r} has the unknown value type {type_id}") from None

    def _advance(self, count: int, what: str) -> int:
        start = self.position
        if count > self._size - start:
            raise self.corrupt(f"the file ends inside {what!r}")
        self.position = start + count
        return start
