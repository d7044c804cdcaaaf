"""The engine's modules, imported as a whole: half an import of a native module cannot be made good in its process."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["import_engine", "interrupts_deferred"]

# What the main thread needs for loading a model and for a request, native packages included.
_MODULES = (
    "mlc_nb.registry",
    "mlc_nb.batch.run",
    "mlc_nb.engine.engine",
    "mlc_nb.engine.model",
    "mlc_nb.protocol.chat_template",
    "mlc_nb.notebook.batch_cell",
    "mlc_nb.notebook.chat_cell",
    "mlc_nb.notebook.comparison",
    "gguf",
    "jinja2",
    "llguidance",
    "numpy.random",
    "tokenizers",
    "tqdm.std",
)


def import_engine() -> None:
    """Import what magics need to talk to a model; an interrupt is a KeyboardInterrupt once that is done."""
    with interrupts_deferred():
        for name in _MODULES:
            importlib.import_module(name)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let a SIGINT that comes in the block take effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def remember(signum: int, _frame: FrameType | None) -> None:
        came.append(signum)

    before: Any = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, None)
