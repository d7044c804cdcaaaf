"""Damaged GGUF files: whatever the bytes, the answer is a model or one ModelFormatError, soon and in little memory."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mlc_nb.errors import BadRequestError, ModelFormatError
from mlc_nb.protocol.chat_template import ChatTemplate
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.gguf_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

MUTATIONS = settings(
    max_examples=2000,
    deadline=2000,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
INTERESTING = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]


def _load(path: Path) -> None:
    """Do all that the engine does with a file, and touch every tensor."""
    with GGUFFile.open(path) as file:
        for tensor in file.tensors.values():
            tensor.data.sum()
        loaded = load_tokenizer(file.metadata)
        ids = loaded.tokenizer.encode("ab é 世<|im_end|>", add_special_tokens=False).ids
        loaded.tokenizer.decode(ids, skip_special_tokens=False)
        if loaded.chat_template is not None:
            template = ChatTemplate(loaded.chat_template, bos_token=loaded.bos_token, eos_token=loaded.eos_token)
            template.render([{"role": "user", "content": "hi"}])


def _survives(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with contextlib.suppress(ModelFormatError, BadRequestError):
        _load(path)


@MUTATIONS
@given(st.data())
def test_changed_numbers(tiny_gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.sampled_from([1, 2, 4, 8]))
        position = data.draw(st.integers(0, len(content) - size))
        value = data.draw(st.sampled_from(INTERESTING)) % (1 << 8 * size)
        content[position : position + size] = value.to_bytes(size, "little")
    _survives(tmp_path / "fuzz.gguf", bytes(content))


@MUTATIONS
@given(st.data())
def test_cut_and_spliced_files(tiny_gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = tiny_gguf.read_bytes()
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    _survives(tmp_path / "fuzz.gguf", content[:start] + data.draw(st.binary(max_size=64)) + content[end:])


def test_every_truncation_of_the_header_is_found(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(content) - 1, 3):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFormatError):
            GGUFFile.open(path)


def test_every_byte_of_the_header_can_be_wrong(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    with GGUFFile.open(tiny_gguf) as file:
        header = len(content) - sum(tensor.data.size for tensor in file.tensors.values())
    for position in range(header):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        _survives(tmp_path / "fuzz.gguf", bytes(damaged))


def test_claims_cost_neither_time_nor_memory(smollm2_path: Path, tmp_path: Path) -> None:
    """Lengths and counts that the file cannot hold are refused before anything is allocated for them."""
    content = bytearray(smollm2_path.read_bytes()[: 3 << 20])
    path = tmp_path / "claims.gguf"
    for key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges"):
        count_at = content.index(key) + len(key) + 8
        for claim in (1 << 31, 1 << 40, (1 << 64) - 1):
            damaged = content.copy()
            damaged[count_at : count_at + 8] = claim.to_bytes(8, "little")
            path.write_bytes(damaged)
            start = time.perf_counter()
            tracemalloc.start()
            with pytest.raises(ModelFormatError):
                GGUFFile.open(path)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 64e6
            assert time.perf_counter() - start < 5
