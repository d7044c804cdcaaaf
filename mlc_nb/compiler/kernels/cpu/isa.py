"""What each ISA level of a CPU offers to the kernels, and the LLVM target that goes with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mlc_nb.errors import CompileError

__all__ = ["ISA_LEVELS", "IsaLevel", "isa_level"]

DotMethod = Literal["multiply", "maddubs", "vnni", "sdot"]


@dataclass(frozen=True)
class IsaLevel:
    """One level: a set of instructions, never a concrete CPU, so that a bundle moves between machines.

    Attributes
    ----------
    name
        The name used in bundle keys, such as ``avx2``.
    triple, cpu, features
        LLVM's target triple, CPU name and comma-separated feature list.
    lanes
        float32 lanes in a vector register (4, 8 or 16).
    dot
        How four int8 products are summed into an int32 lane: plain multiplication, ``pmaddubsw`` on int16 sums,
        ``vpdpbusd``, or the NEON dot product.
    fused_multiply_add
        Whether the level has an FMA instruction.
    hardware_half
        Whether float16 converts to and from float32 in hardware.
    token_tile
        Rows of activations that one register tile of a product holds.
    registers
        Vector registers.
    """

    name: str
    triple: str
    cpu: str
    features: str
    lanes: int
    dot: DotMethod
    fused_multiply_add: bool
    hardware_half: bool
    token_tile: int
    registers: int

    @property
    def multiplies_pairs(self) -> bool:
        """Whether many 16-bit activations go as int16 through ``pmaddwd``, rather than as two int8 terms.

        They do on x86 without VNNI. Elsewhere a sum of int8 products is one instruction, and two terms cost no more.
        """
        return self.dot in ("multiply", "maddubs")

    def code_rows(self, terms: int) -> int:
        """Rows of eight int32 in a block of activation codes: one for each int8 term, two more where int16 follow."""
        return terms + 2 if terms == 2 and self.multiplies_pairs else terms

    def dividing(self, size: int) -> IsaLevel:
        """The level with the longest vectors that divide ``size`` elements.

        Raises
        ------
        CompileError
            If not even vectors of four elements do.
        """
        lanes = self.lanes
        while size % lanes:
            lanes //= 2
        if lanes < 4:
            raise CompileError(f"a row of {size} float32 elements cannot be cut into vectors; it needs a multiple of 4")
        return replace(self, lanes=lanes)


_X86 = "x86_64-unknown-linux-gnu"
_ARM = "aarch64-unknown-linux-gnu"

ISA_LEVELS: dict[str, IsaLevel] = {
    level.name: level
    for level in (
        IsaLevel("x86-64", _X86, "x86-64", "", 4, "multiply", False, False, 2, 16),
        IsaLevel("avx2", _X86, "x86-64-v3", "", 8, "maddubs", True, True, 4, 16),
        IsaLevel("avx-vnni", _X86, "x86-64-v3", "+avxvnni", 8, "vnni", True, True, 4, 16),
        IsaLevel("avx512", _X86, "x86-64-v4", "", 8, "maddubs", True, True, 4, 32),
        IsaLevel("avx512-vnni", _X86, "x86-64-v4", "+avx512vnni", 16, "vnni", True, True, 8, 32),
        IsaLevel("neon-dot", _ARM, "generic", "+neon,+dotprod,+fullfp16", 4, "sdot", True, True, 4, 32),
    )
}


def isa_level(name: str) -> IsaLevel:
    """Look a level up by name.

    Raises
    ------
    CompileError
        If there is no such level; the message lists those that exist.
    """
    try:
        return ISA_LEVELS[name]
    except KeyError:
        raise CompileError(f"there is no ISA level {name!r}; the levels are {', '.join(ISA_LEVELS)}") from None
