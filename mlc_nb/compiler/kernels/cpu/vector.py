"""Vector code for one ISA level, emitted through TVM's IR builder: the words in which the kernels are written.

Every sum of products goes through `VectorCode.fma` explicitly, so that no compiler decides which products are fused:
results are the same whatever the shape of the surrounding loop (design, decision 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlc_nb.compiler.kernels.cpu.isa import IsaLevel

__all__ = ["ROW_TILE", "VectorCode", "build_kernel", "parallel_rows", "quotient", "remainder"]

ROW_TILE = 16
"""Output rows that are stored side by side in packed weights; every level's vector length divides it."""

_SERIAL_BELOW = 4
"""Kernels whose work per row is small wake no thread for fewer rows than this."""

_LARGEST_HALF = 65504.0

# float32 with this value added is rounded to an integer that sits in the low bits (1.5 * 2**23).
_ROUNDING_MAGIC = 12582912.0
_ROUNDING_MAGIC_BITS = 0x4B400000


def build_kernel(body: Callable[[], None]) -> tirx.PrimFunc:
    """Build a private PrimFunc whose arguments and statements ``body`` emits."""
    with IRBuilder() as ib, T.prim_func(is_private=True):
        body()
    return ib.get().with_attr({"tirx.noalias": True})


def parallel_rows(rows: Any, emit: Callable[[Any], None]) -> None:
    """Emit ``emit(row)`` for each row: over threads when there are many rows, on this one when there are few."""
    with T.If(rows >= _SERIAL_BELOW):
        with T.Then(), T.parallel(0, rows) as row:
            emit(row)
        with T.Else(), T.serial(0, rows) as row:
            emit(row)


def quotient(value: Any, divisor: Any) -> Any:
    """``value // divisor`` of integers that are not negative.

    TVM's floor division expands to a select over signs, which its simplifier takes seconds to see through.
    """
    return tirx.truncdiv(value, divisor)


def remainder(value: Any, divisor: Any) -> Any:
    """``value % divisor`` of integers that are not negative; see `quotient`."""
    return tirx.truncmod(value, divisor)


class VectorCode:
    """Emits vector operations of one ISA level.

    Vectors of ``lanes`` elements are plain TIR expressions; ``bind`` names one so that it is computed once.
    """

    def __init__(self, level: IsaLevel) -> None:
        self.level = level
        self.lanes = level.lanes
        self.tile_vectors = ROW_TILE // level.lanes
        self.f32 = f"float32x{self.lanes}"
        self.i32 = f"int32x{self.lanes}"

    bind = staticmethod(T.Bind)

    # -- constants, loads and stores

    def splat(self, value: Any, dtype: str = "float32") -> Any:
        """A vector with ``value`` in every lane."""
        scalar = tirx.const(value, dtype) if isinstance(value, int | float) else value
        return T.broadcast(scalar, self.lanes)

    def load(self, buffer: Any, *index: Any) -> Any:
        """``lanes`` consecutive elements of the last axis, in the buffer's own dtype."""
        return buffer.vload(list(index), f"{buffer.dtype}x{self.lanes}")

    def store(self, buffer: Any, value: Any, *index: Any, lanes: int | None = None) -> None:
        """Store a vector to consecutive elements of the last axis."""
        *outer, last = index
        T.buffer_store(buffer, value, [*outer, T.ramp(last, 1, lanes or self.lanes)])

    def scratch(self, size: int, dtype: str = "float32") -> Any:
        """A small buffer of this thread that the optimiser keeps in registers where it can."""
        return T.alloc_buffer((size,), dtype, scope="local")

    # -- arithmetic

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c`` with one rounding where the level has the instruction."""
        if self.level.fused_multiply_add:
            return T.call_llvm_pure_intrin(self.f32, "llvm.fma", a, b, c)
        return a * b + c

    def round_to_int(self, value: Any) -> Any:
        """Round float32 lanes of magnitude below 2**22 to int32, ties to even."""
        shifted = self.fma(value, self.splat(1.0), self.splat(_ROUNDING_MAGIC))
        return T.reinterpret(self.i32, shifted) - self.splat(_ROUNDING_MAGIC_BITS, "int32")

    def exp(self, value: Any) -> Any:
        """``e**x`` within 3 ulp; exactly 1 at 0 and exactly 0 below -87.3.

        Range reduction by multiples of ln 2 in two parts, then the degree-6 Taylor polynomial of the remainder.
        """
        x = T.Bind(tirx.max(tirx.min(value, self.splat(88.0)), self.splat(-88.0)))
        n = T.Bind(self.round_to_int(x * self.splat(1.4426950408889634)))
        n_float = T.Bind(T.Cast(self.f32, n))
        r = self.fma(n_float, self.splat(-0.693145751953125), x)
        r = T.Bind(self.fma(n_float, self.splat(-1.428606765330187e-06), r))
        poly = self.splat(1.0 / 720)
        for coefficient in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
            poly = self.fma(poly, r, self.splat(coefficient))
        bits = T.reinterpret(self.i32, T.Bind(poly)) + (n << self.splat(23, "int32"))
        return T.Select(x < self.splat(-87.3), self.splat(0.0), T.reinterpret(self.f32, bits))

    def reduce(self, vectors: Sequence[Any], combine: Callable[[Any, Any], Any], dtype: str = "float32") -> Any:
        """Combine all lanes of the vectors into a scalar, always in the same order."""
        total = vectors[0]
        for vector in vectors[1:]:
            total = combine(total, vector)
        lanes = self.scratch(self.lanes, dtype)
        self.store(lanes, total, 0)
        values = [lanes[i] for i in range(self.lanes)]
        while len(values) > 1:
            half = len(values) // 2
            values = [T.Bind(combine(values[i], values[i + half])) for i in range(half)]
        return values[0]

    # -- float16 and bfloat16

    def half_to_float(self, value: Any) -> Any:
        """float16 lanes to float32."""
        if self.level.hardware_half:
            return T.Cast(self.f32, value)
        lanes = self.lanes
        bits = T.Bind(T.Cast(f"int32x{lanes}", T.reinterpret(f"uint16x{lanes}", value)))
        sign = (bits & self.splat(0x8000, "int32")) << self.splat(16, "int32")
        magnitude = T.Bind((bits & self.splat(0x7FFF, "int32")) << self.splat(13, "int32"))
        # Scaling by 2**112 restores the exponent's bias and normalises subnormals; infinities and NaNs keep all ones.
        scaled = T.reinterpret(self.f32, magnitude) * self.splat(2.0**112)
        special = T.reinterpret(self.f32, magnitude | self.splat(0x7F800000, "int32"))
        finite = T.Select(magnitude < self.splat(0x0F800000, "int32"), scaled, special)
        return T.reinterpret(self.f32, T.reinterpret(self.i32, finite) | sign)

    def float_to_pool(self, value: Any, dtype: str) -> Any:
        """float32 lanes as ``dtype`` of the KV pool; what float16 cannot hold becomes its largest number.

        An infinity would outlive its request: a page's next owner weights it with zero, which makes a NaN.
        """
        if dtype == "float16":
            largest = self.splat(_LARGEST_HALF)
            value = tirx.min(tirx.max(value, self.splat(-_LARGEST_HALF)), largest)
        return T.Cast(f"{dtype}x{self.lanes}", value)

    def bfloat16_bits_to_float(self, value: Any) -> Any:
        """uint16 lanes that hold bfloat16 to float32."""
        return T.reinterpret(self.f32, T.Cast(f"uint32x{self.lanes}", value) << self.splat(16, "uint32"))

    # -- sums of int8 products: four products go into one int32 lane

    def dot_start(self) -> Any:
        """The empty sum; None stands for zero so that the first product needs no addition."""
        return None

    def dot_nibbles(self, total: Any, weights: Any, activations: Any) -> Any:
        """Add products of unsigned 4-bit weights (one a byte) and int8 activations; at most 8 additions a sum.

        ``weights`` and ``activations`` are int32 lanes of four bytes. With pmaddubsw the sums stay in int16:
        8 * 2 * 15 * 127 = 30,480 fits.
        """
        if self.level.dot == "maddubs":
            product = T.call_llvm_pure_intrin(
                f"int16x{2 * self.lanes}", "llvm.x86.avx2.pmadd.ub.sw", self._bytes(weights), self._bytes(activations)
            )
            return T.Bind(product if total is None else total + product)
        if self.level.dot == "vnni":
            return T.Bind(self._vpdpbusd(total, weights, activations))
        if self.level.dot == "sdot":
            return T.Bind(self._sdot(total, weights, activations))
        return T.Bind(self._multiply_bytes(total, weights, activations))

    def dot_nibbles_finish(self, total: Any) -> Any:
        """The sum of `dot_nibbles` as int32 lanes."""
        if self.level.dot == "maddubs":
            return self._pair_sums(total)
        return total

    def dot_bytes_bias(self, weight_groups: Sequence[Any]) -> Any:
        """What `dot_bytes_finish` subtracts for these int8 weights: 128 times their sum with vpdpbusd, else nothing."""
        if self.level.dot != "vnni":
            return None
        total = None
        for weights in weight_groups:
            total = self._vpdpbusd(total, self.splat(-0x7F7F7F80, "int32"), weights)
        return T.Bind(total)

    def dot_bytes(self, total: Any, weights: Any, activations: Any) -> Any:
        """Add products of int8 weights and int8 activations; activations lie in -127 to 127.

        With pmaddubsw the sign of the weight moves to the activation: 2 * 128 * 127 = 32,512 fits in int16.
        """
        if self.level.dot == "maddubs":
            magnitude = T.call_llvm_pure_intrin(
                f"int8x{4 * self.lanes}", "llvm.abs", self._bytes(weights), T.bool(False)
            )
            signed = T.call_llvm_pure_intrin(
                f"int8x{4 * self.lanes}", "llvm.x86.avx2.psign.b", self._bytes(activations), self._bytes(weights)
            )
            products = T.call_llvm_pure_intrin(
                f"int16x{2 * self.lanes}", "llvm.x86.avx2.pmadd.ub.sw", magnitude, signed
            )
            sums = self._pair_sums(products)
            return T.Bind(sums if total is None else total + sums)
        if self.level.dot == "vnni":
            unsigned = activations ^ self.splat(-0x7F7F7F80, "int32")
            return T.Bind(self._vpdpbusd(total, unsigned, weights))
        if self.level.dot == "sdot":
            return T.Bind(self._sdot(total, weights, activations))
        return T.Bind(self._multiply_bytes(total, weights, activations))

    def dot_bytes_finish(self, total: Any, bias: Any) -> Any:
        """The sum of `dot_bytes` as int32 lanes."""
        return total if bias is None else total - bias

    # -- sums of int16 products: two products go into one int32 lane

    def nibble_pairs(self, word: Any) -> list[Any]:
        """Split int32 lanes of eight 4-bit weights into lanes of two int16.

        Of bytes 0 to 3 the low nibbles 0 and 2, 1 and 3, then the high nibbles likewise.
        """
        mask = self.splat(0x000F000F, "int32")
        return [self.bind((word >> self.splat(shift, "int32") if shift else word) & mask) for shift in (0, 8, 4, 12)]

    def byte_pairs(self, word: Any) -> list[Any]:
        """Split int32 lanes of four int8 weights into lanes of two int16: bytes 0 and 2, then 1 and 3."""
        halves = self.bind(T.reinterpret(f"int16x{2 * self.lanes}", word))
        eight = T.broadcast(T.int16(8), 2 * self.lanes)
        return [self.bind(T.reinterpret(self.i32, vector >> eight)) for vector in (self.bind(halves << eight), halves)]

    def swap_middle(self, value: Any) -> Any:
        """Lanes 0, 2, 1, 3 of every four: the order of `nibble_pairs` and `byte_pairs`."""
        order = [4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(self.lanes)]
        return tirx.Shuffle([value], order)

    def dot_pairs(self, total: Any, weights: Any, activations: Any) -> Any:
        """Add products of int16 weights and int16 activations, both as int32 lanes of two."""
        prefix = "sse2" if self.lanes == 4 else "avx2"
        halves = f"int16x{2 * self.lanes}"
        product = T.call_llvm_pure_intrin(
            self.i32, f"llvm.x86.{prefix}.pmadd.wd", T.reinterpret(halves, weights), T.reinterpret(halves, activations)
        )
        return T.Bind(product if total is None else total + product)

    def _bytes(self, lanes_of_four: Any) -> Any:
        return T.reinterpret(f"int8x{4 * self.lanes}", lanes_of_four)

    def _pair_sums(self, total: Any) -> Any:
        ones = T.broadcast(T.int16(1), 2 * self.lanes)
        return T.call_llvm_pure_intrin(self.i32, "llvm.x86.avx2.pmadd.wd", total, ones)

    def _vpdpbusd(self, total: Any, unsigned: Any, signed: Any) -> Any:
        start = self.splat(0, "int32") if total is None else total
        bits = 32 * self.lanes
        return T.call_llvm_pure_intrin(
            self.i32,
            f"llvm.x86.avx512.vpdpbusd.{bits}",
            start,
            T.reinterpret(f"uint8x{4 * self.lanes}", unsigned),
            self._bytes(signed),
        )

    def _sdot(self, total: Any, weights: Any, activations: Any) -> Any:
        start = self.splat(0, "int32") if total is None else total
        return T.call_llvm_pure_intrin(
            self.i32, "llvm.aarch64.neon.sdot", start, self._bytes(weights), self._bytes(activations)
        )

    def _multiply_bytes(self, total: Any, weights: Any, activations: Any) -> Any:
        for byte in range(4):
            up, down = self.splat(24 - 8 * byte, "int32"), self.splat(24, "int32")
            product = ((weights << up) >> down) * ((activations << up) >> down)
            total = product if total is None else total + product
        return total
