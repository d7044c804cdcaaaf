"""How much of a device an engine may take, and what to do where that is too little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mlc_nb.runtime.memory import device_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.runtime.memory import MemoryRow

__all__ = ["Room", "WholeDevice"]


class Room(Protocol):
    """The share of a device's memory that is left for one engine that is being loaded or resized."""

    def free_bytes(self) -> int:
        """Bytes of the device that are free and promised to nobody."""

    def most_bytes(self) -> int | None:
        """Bytes that a limit on this process's engines leaves; None where there is none."""

    def make(self, missing: int) -> bool:
        """Free so many bytes by ending engines that are idle, or none; whether that was done."""

    def take(self, size: int) -> None:
        """Have so many bytes counted as taken from now on."""

    def others(self) -> Sequence[MemoryRow]:
        """Engines that hold memory of the device, and how much."""


class WholeDevice:
    """Implements `Room` for an engine that nobody else keeps account of: all that is free."""

    def __init__(self, device: str) -> None:
        self._memory = device_memory(device)

    def free_bytes(self) -> int:
        """Bytes that are free."""
        return self._memory.free_bytes()

    def most_bytes(self) -> int | None:
        """No limit."""
        return None

    def make(self, missing: int) -> bool:
        """Nothing is idle here."""
        del missing
        return False

    def take(self, size: int) -> None:
        """Nobody keeps account."""

    def others(self) -> Sequence[MemoryRow]:
        """Nobody else is known."""
        return ()
