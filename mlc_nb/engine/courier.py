"""Brings deltas to their readers while the engine thread is in the next step."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlc_nb.engine.stream import Outbox, StreamDelta

__all__ = ["Courier"]


class Courier:
    """A thread that fills outboxes.

    Whoever is woken wants the interpreter at once. If the engine thread woke the readers itself, it would wait for each
    of them before it could call the model; so it hands a whole step over, and they run during the native call.
    Everything that goes to an outbox goes this way, so the order is kept.

    Parameters
    ----------
    name
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._parcels: queue.SimpleQueue[list[tuple[Outbox, StreamDelta | Exception]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, parcel: list[tuple[Outbox, StreamDelta | Exception]]) -> None:
        """Have each item put into its outbox; does not wait."""
        if parcel:
            self._parcels.put(parcel)

    def close(self) -> None:
        """End the thread once it has brought everything; waits for that."""
        self._parcels.put(None)
        self._thread.join()

    def _run(self) -> None:
        for parcel in iter(self._parcels.get, None):
            for outbox, item in parcel:
                outbox.put(item)
