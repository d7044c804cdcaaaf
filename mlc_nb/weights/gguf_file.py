"""GGUF files: metadata and tensors, every count, size and offset checked before it is used.

The `gguf` package gives the format's constants. Its reader trusts the counts in the file and takes seconds for a
vocabulary of ordinary size, so the walk over the metadata is here.
"""

from __future__ import annotations

import errno
import math
import mmap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, Keys

from mlc_nb.errors import ModelFormatError, ModelNotFoundError, OutOfMemoryError
from mlc_nb.weights.gguf_cursor import GGUFCursor

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["SUPPORTED_BLOCK_TYPES", "GGUFFile", "GGUFTensor"]

SUPPORTED_BLOCK_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_HEADER_BYTES = 24


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """One tensor, still in the file's own blocks.

    Attributes
    ----------
    name
        The tensor's name, such as ``blk.0.attn_q.weight``.
    shape
        Elements along each axis in numpy order: ``(N, K)`` for a linear of K inputs and N outputs.
    block_type
        One of `SUPPORTED_BLOCK_TYPES`.
    data
        Read-only uint8 ``[N, bytes per row]`` view of the mapped file (``[1, bytes]`` for one axis; leading axes are
        folded into N when there are more than two).
    """

    name: str
    shape: tuple[int, ...]
    block_type: str
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """An open GGUF file. Use `GGUFFile.open`; the object is a context manager.

    Attributes
    ----------
    path
        The file.
    architecture
        The value of ``general.architecture``, such as ``llama``.
    metadata
        Key to value: Python scalars and strings, lists of strings, one-dimensional numpy arrays of numbers.
    tensors
        Name to `GGUFTensor`, in the file's order. The views share the file's mapping; nothing is copied.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        metadata: Mapping[str, object],
        tensors: Mapping[str, GGUFTensor],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.architecture = _architecture(path, metadata)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Map a GGUF file and read its metadata and its table of tensors.

        Parameters
        ----------
        path
            A single-file GGUF, little-endian, version 2 or 3.

        Raises
        ------
        ModelNotFoundError
            The file does not exist or cannot be read.
        ModelFormatError
            The file is no GGUF, is truncated or corrupt, is a part of a split model, has an old or a big-endian
            form, or holds block types that this version cannot run (all of them are named).
        """
        path = Path(path)
        mapping = _map_file(path)
        try:
            metadata, tensors = _read(path, mapping)
            return cls(path, mapping, MappingProxyType(metadata), MappingProxyType(tensors))
        except BaseException:
            _release(mapping)
            raise

    def drop_arrays(self) -> None:
        """Forget metadata that are arrays: the vocabulary's 100,000 strings, which nobody wants twice."""
        kept = {key: value for key, value in self.metadata.items() if isinstance(value, int | float | str | bool)}
        self.metadata = MappingProxyType(kept)

    def close(self) -> None:
        """Drop the tensors and the mapping; a second call does nothing.

        Views that the caller still holds stay valid: the memory goes back when the last of them is dropped.
        """
        if self._mapping is None:
            return
        self.tensors = MappingProxyType({})
        mapping, self._mapping = self._mapping, None
        _release(mapping)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _release(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        # numpy views of the mapping are alive; each holds it, and the last one to go releases it
        return


def _map_file(path: Path) -> mmap.mmap:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # To open a pipe waits for its other end.
            raise ModelFormatError(f"{path} is a device, a pipe or a socket, not a GGUF file. Name a .gguf file.")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < _HEADER_BYTES:
                raise ModelFormatError(
                    f"{path} is not a GGUF model: it has {size} bytes, less than a GGUF header. Fetch the file again."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"There is no file {path}. Check the path.") from None
    except IsADirectoryError:
        raise ModelFormatError(f"{path} is a directory, not a GGUF file. Name the .gguf file in it.") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise OutOfMemoryError(
                f"There is no address space to read {path} in: free memory, or raise its limit."
            ) from error
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error


def _read(path: Path, mapping: mmap.mmap) -> tuple[dict[str, object], dict[str, GGUFTensor]]:
    cursor = GGUFCursor(mapping, path)
    tensor_count, key_count = _read_header(cursor)
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.string("the name of a metadata key", limit=65535)
        if key in metadata:
            raise cursor.corrupt(f"the metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.u32(key), key)
    _refuse_split(path, metadata)
    infos = _read_tensor_table(cursor, tensor_count)
    return metadata, _locate_tensors(cursor, infos, _alignment(cursor, metadata))


def _read_header(cursor: GGUFCursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        hint = "convert the model to GGUF with a current converter"
        if magic == b"vers":
            hint = "it looks like a Git LFS pointer, a text file that stands for the model: fetch the file itself"
        raise ModelFormatError(f"{cursor.path} is not a GGUF model: it begins with {magic!r}, not b'GGUF'; {hint}.")
    version = cursor.u32("the version")
    if version != 0 and version & 0xFFFF == 0:
        raise ModelFormatError(
            f"{cursor.path} is a big-endian GGUF file; only little-endian files can be run. Use the ordinary build of "
            "this model, or convert it again on a little-endian machine."
        )
    if version not in (2, 3):
        raise ModelFormatError(
            f"{cursor.path} is a GGUF file of version {version}; versions 2 and 3 can be run. Convert the model again "
            "with a current converter."
        )
    tensor_count, key_count = cursor.u64("the number of tensors"), cursor.u64("the number of metadata keys")
    if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
        raise cursor.corrupt(f"it claims {tensor_count} tensors and {key_count} metadata keys")
    return tensor_count, key_count


def _refuse_split(path: Path, metadata: Mapping[str, object]) -> None:
    parts = metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelFormatError(
            f"{path} is one part of a split GGUF model ({parts} parts); split models cannot be run. Merge the parts "
            "into one file first (llama.cpp's gguf-split --merge does this)."
        )


def _alignment(cursor: GGUFCursor, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT and alignment & (alignment - 1) == 0:
        return alignment
    raise cursor.corrupt(f"{Keys.General.ALIGNMENT} is {alignment!r}, not a power of two up to {_MAX_ALIGNMENT}")


def _architecture(path: Path, metadata: Mapping[str, object]) -> str:
    architecture = metadata.get(Keys.General.ARCHITECTURE)
    if not isinstance(architecture, str) or not architecture:
        raise ModelFormatError(f"{path} does not say its architecture ({Keys.General.ARCHITECTURE} is missing).")
    return architecture


def _read_tensor_table(cursor: GGUFCursor, count: int) -> list[_TensorInfo]:
    infos: list[_TensorInfo] = []
    names: set[str] = set()
    for _ in range(count):
        name = cursor.string("the name of a tensor", limit=1024)
        if name in names:
            raise cursor.corrupt(f"the tensor {name!r} appears twice")
        names.add(name)
        rank = cursor.u32(name)
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise cursor.corrupt(f"the tensor {name!r} has {rank} axes, not 1 to {_MAX_DIMENSIONS}")
        shape = tuple(cursor.u64(name) for _ in range(rank))[::-1]
        infos.append(_TensorInfo(name, shape, type_id=cursor.u32(name), offset=cursor.u64(name)))
    return infos


def _locate_tensors(cursor: GGUFCursor, infos: list[_TensorInfo], alignment: int) -> dict[str, GGUFTensor]:
    types = {info.name: _type_name(info.type_id) for info in infos}
    unsupported = Counter(name for name in types.values() if name not in SUPPORTED_BLOCK_TYPES)
    if unsupported:
        found = ", ".join(f"{name} ({count} tensors)" for name, count in sorted(unsupported.items()))
        raise ModelFormatError(
            f"{cursor.path} has weights of the block types {found}; this version runs "
            f"{', '.join(SUPPORTED_BLOCK_TYPES)}. Use a build of the model in one of these."
        )
    start = -(-cursor.position // alignment) * alignment
    file_bytes: npt.NDArray[np.uint8] = np.frombuffer(cursor.mapping, dtype=np.uint8)
    tensors: dict[str, GGUFTensor] = {}
    end_of_previous, previous = 0, ""
    located: dict[str, tuple[int, int, int]] = {}
    for info in sorted(infos, key=lambda info: info.offset):
        row_bytes, rows = _row_size(cursor, info), math.prod(info.shape[:-1])
        end = info.offset + row_bytes * rows
        if info.offset % alignment:
            raise cursor.corrupt(f"the tensor {info.name!r} is at offset {info.offset}, no multiple of {alignment}")
        if start + end > len(file_bytes):
            raise cursor.corrupt(
                f"the tensor {info.name!r} ends at byte {start + end} of a file of {len(file_bytes)} bytes"
            )
        if info.offset < end_of_previous:
            raise cursor.corrupt(f"the tensors {previous!r} and {info.name!r} overlap")
        end_of_previous, previous = end, info.name
        located[info.name] = (start + info.offset, rows, row_bytes)
    for info in infos:
        offset, rows, row_bytes = located[info.name]
        data = file_bytes[offset : offset + rows * row_bytes].reshape(rows, row_bytes)
        tensors[info.name] = GGUFTensor(info.name, info.shape, types[info.name], data)
    return tensors


def _row_size(cursor: GGUFCursor, info: _TensorInfo) -> int:
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)]
    if min(info.shape) < 1:
        raise cursor.corrupt(f"the tensor {info.name!r} has the shape {info.shape}")
    if info.shape[-1] % block_elements:
        raise cursor.corrupt(
            f"rows of the tensor {info.name!r} have {info.shape[-1]} elements, no multiple of {block_elements}"
        )
    return int(info.shape[-1] // block_elements * block_bytes)


def _type_name(type_id: int) -> str:
    try:
        return str(GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"number {type_id}"
