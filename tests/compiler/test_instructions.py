"""Each ISA level gets the instructions that it is there for, whatever machine compiles it."""

from __future__ import annotations

import re

import pytest

from mlc_nb.compiler.kernels.cpu.isa import ISA_LEVELS
from mlc_nb.compiler.kernels.cpu.linear import float_product, quantized_product
from tests.compiler.compiled import assembly

INSTRUCTIONS = {
    "avx2": r"vpmaddubsw\s.*%ymm",
    "avx512": r"vpmaddubsw\s.*%ymm",
    "avx-vnni": r"\{vex\}\s+vpdpbusd\s.*%ymm|vpdpbusd\s.*%ymm",
    "avx512-vnni": r"vpdpbusd\s.*%zmm",
    "neon-dot": r"sdot\s+v\d+\.4s, v\d+\.16b, v\d+\.(16b|4b)",
}
FUSED = {"neon-dot": r"fmla\s+v\d+\.4s"}


def test_every_level_is_looked_at() -> None:
    assert {*INSTRUCTIONS, "x86-64"} == set(ISA_LEVELS)


@pytest.mark.parametrize("block_type", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("level", list(INSTRUCTIONS))
def test_products_use_the_level_s_dot_product(level: str, block_type: str) -> None:
    text = assembly(level, quantized_product, block_type, 16, 32, False, 1)
    assert re.search(INSTRUCTIONS[level], text), level
    assert re.search(FUSED.get(level, r"vfmadd"), text), level
    if level == "avx2":
        assert "%zmm" not in text


def test_plain_x86_64_uses_nothing_newer() -> None:
    text = assembly("x86-64", float_product, "F16", 16, 32, False)
    assert not re.search(r"%[yz]mm|\sv[a-z]+\s", text)
