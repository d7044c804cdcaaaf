"""What an engine is going to take, against what is free: a table with numbers before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlc_nb.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.runtime.memory import MemoryNeeds, MemoryRow

__all__ = ["SHARE_OF_FREE_MEMORY", "MemoryPlan"]

SHARE_OF_FREE_MEMORY = 0.85
_LEAST_TOKENS = 16
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """An engine's memory before it exists.

    Attributes
    ----------
    needs
        What the model takes on the device.
    kv_tokens
        Tokens that the KV cache is to hold.
    free_bytes
        Bytes that are free; a share of 85 % may be used.
    most_bytes
        Bytes that a memory limit leaves; None for no limit.
    """

    needs: MemoryNeeds
    kv_tokens: int
    free_bytes: int
    most_bytes: int | None = None

    @property
    def size(self) -> int:
        """Bytes of everything together."""
        return self.needs.fixed + self.kv_tokens * self.needs.kv_token

    @property
    def allowed(self) -> int:
        """Bytes that may be used."""
        allowed = int(self.free_bytes * SHARE_OF_FREE_MEMORY)
        return allowed if self.most_bytes is None else min(allowed, max(self.most_bytes, 0))

    @property
    def tokens_that_fit(self) -> int:
        """Tokens that a KV cache in the allowed memory could hold."""
        return max(self.allowed - self.needs.fixed, 0) // self.needs.kv_token

    @property
    def missing(self) -> int:
        """Bytes that have to become free so that all of it fits; 0 where it does."""
        lacking = self.size - int(self.free_bytes * SHARE_OF_FREE_MEMORY)
        of_device = int(lacking / SHARE_OF_FREE_MEMORY) + 1 if lacking > 0 else 0
        of_limit = 0 if self.most_bytes is None else max(0, self.size - self.most_bytes)
        return max(of_device, of_limit)

    def table(self) -> str:
        """Return a line for each purpose, with its size."""
        rows = [
            ("weights", self.needs.weights, ""),
            ("workspace", self.needs.workspace, ""),
            ("logits", self.needs.logits, ""),
            ("KV cache", self.kv_tokens * self.needs.kv_token, f"  ({self.kv_tokens:,} tokens)"),
            ("together", self.size, ""),
            ("free", self.free_bytes, f"  (of which {SHARE_OF_FREE_MEMORY:.0%} may be used)"),
        ]
        if self.most_bytes is not None:
            rows.append(("left by memory_limit", self.most_bytes, ""))
        return "\n".join(f"  {purpose:<20} {size / _MIB:>12,.1f} MiB{note}" for purpose, size, note in rows)

    def refusal(self, others: Sequence[MemoryRow], *, configured: bool) -> OutOfMemoryError:
        """Return the error for a plan that does not fit, with what would make it fit.

        Parameters
        ----------
        others
            What else holds memory of the device and could be unloaded.
        configured
            Whether the size of the KV cache was asked for.
        """
        ways = []
        if configured and self.tokens_that_fit >= _LEAST_TOKENS:
            ways.append(f"an engine_config.max_total_sequence_length of at most {self.tokens_that_fit:,}")
        ways += [f"unloading {other.purpose}, which holds {other.size / _MIB:,.1f} MiB" for other in others]
        if self.most_bytes is not None and self.most_bytes < self.free_bytes * SHARE_OF_FREE_MEMORY:
            ways.append("a higher memory_limit")
        else:
            ways.append(f"another {self.missing / _MIB:,.1f} MiB of free memory")
        if self.needs.fixed > self.allowed:
            ways.append("a smaller model, or this one stored in fewer bits")
        remedies = "; or ".join(ways)
        return OutOfMemoryError(
            f"The model does not fit in the memory that is free:\n{self.table()}\nIt would fit with {remedies}."
        )
