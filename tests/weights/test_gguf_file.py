from __future__ import annotations

import gc
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from mlc_nb.errors import ModelFormatError, ModelNotFoundError
from mlc_nb.weights.gguf_file import SUPPORTED_BLOCK_TYPES, GGUFFile
from tests.weights.tiny_gguf import write_tiny_gguf


def test_tensors_are_what_the_gguf_package_reads(smollm2_path: Path) -> None:
    reader = gguf.GGUFReader(smollm2_path)
    with GGUFFile.open(smollm2_path) as file:
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.block_type == theirs.tensor_type.name
            assert ours.shape == tuple(theirs.shape.tolist()[::-1])
            assert ours.data.shape[0] == (ours.shape[0] if len(ours.shape) == 2 else 1)
            assert np.array_equal(ours.data.ravel(), np.asarray(theirs.data).view(np.uint8).ravel())
            del theirs


def test_metadata_are_what_the_gguf_package_reads(tiny_gguf: Path) -> None:
    with GGUFFile.open(tiny_gguf) as file:
        for key, field in gguf.GGUFReader(tiny_gguf).fields.items():
            if key.startswith("GGUF."):
                continue
            ours = file.metadata[key]
            assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == field.contents(), key
        assert file.architecture == "llama"
        assert file.metadata["test.flag"] is True


def test_every_supported_block_type_is_mapped_without_a_copy(tiny_gguf: Path) -> None:
    with GGUFFile.open(tiny_gguf) as file:
        assert {tensor.block_type for tensor in file.tensors.values()} == set(SUPPORTED_BLOCK_TYPES)
        bytes_per_row = {"f32": 256, "f16": 128, "bf16": 128, "q8_0": 68, "q4_0": 36, "q4_1": 40}
        for name, size in bytes_per_row.items():
            data = file.tensors[name].data
            assert data.shape == (3, size)
            assert data.dtype == np.uint8
            assert not data.flags.owndata
            assert not data.flags.writeable
        assert file.tensors["norm"].data.shape == (1, 256)
        del data


def test_the_default_model_opens_fast(smollm2_path: Path) -> None:
    best = min(_seconds_to_open(smollm2_path) for _ in range(3))
    print(f"opened in {best * 1e3:.0f} ms")
    assert best < 1.5  # 0.06 s on a quiet machine; gguf's own reader takes 2.3 s


def _seconds_to_open(path: Path) -> float:
    start = time.perf_counter()
    GGUFFile.open(path).close()
    return time.perf_counter() - start


def test_close_releases_the_mapping_and_keeps_views_alive(tiny_gguf: Path) -> None:
    file = GGUFFile.open(tiny_gguf)
    view = file.tensors["norm"].data
    before = view.copy()
    file.close()
    file.close()
    assert not file.tensors
    assert np.array_equal(view, before)
    assert str(tiny_gguf) in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert str(tiny_gguf) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "0 bytes"),
        (b"GGUF" + b"\0" * 10, "14 bytes"),
        (b"GGML" + b"\0" * 40, "not b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 40, "version 1"),
        (b"GGUF" + struct.pack("<I", 99) + b"\0" * 40, "version 99"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 40, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + b"\0" * 40, "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + b"\0" * 40, "1152921504606846976 metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing"),
    ],
)
def test_files_that_are_no_gguf_model(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=sentence):
        GGUFFile.open(path)


def test_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        GGUFFile.open(tmp_path / "missing.gguf")
    with pytest.raises(ModelFormatError, match="is a directory"):
        GGUFFile.open(tmp_path)


def test_split_models_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    write_tiny_gguf(path, extra=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ModelFormatError, match="split GGUF model \\(3 parts\\)"):
        GGUFFile.open(path)


def test_all_unsupported_block_types_are_named_at_once(tmp_path: Path) -> None:
    def add_others(writer: gguf.GGUFWriter) -> None:
        for kind in ("Q5_1", "Q4_K", "IQ4_NL"):
            block_type = gguf.GGMLQuantizationType[kind]
            elements, size = gguf.GGML_QUANT_SIZES[block_type]
            blocks = np.zeros((2, 256 // elements * size), dtype=np.uint8)
            writer.add_tensor(f"extra.{kind}", blocks, raw_dtype=block_type)

    path = tmp_path / "other.gguf"
    write_tiny_gguf(path, extra=add_others)
    with pytest.raises(ModelFormatError, match=r"IQ4_NL \(1 tensors\), Q4_K \(1 tensors\), Q5_1 \(1 tensors\)"):
        GGUFFile.open(path)


def test_a_truncated_model_is_damaged(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:-300])
    with pytest.raises(ModelFormatError, match="ends at byte"):
        GGUFFile.open(path)
