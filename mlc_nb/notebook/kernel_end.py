"""A kernel that is told to shut down or restart terminates its engines first."""

from __future__ import annotations

from typing import Any

from mlc_nb import lifecycle

__all__ = ["KernelEnd"]


class KernelEnd:
    """Wraps ``kernel.do_shutdown``: it runs on the control thread, so it comes before any clean-up of the main one.

    Parameters
    ----------
    kernel
        The ipykernel that runs this process.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._attached = True
        original = kernel.do_shutdown

        def do_shutdown(restart: bool) -> Any:
            if self._attached:
                lifecycle.end_now()
            return original(restart)

        self._wrapper = do_shutdown
        kernel.do_shutdown = do_shutdown

    def detach(self) -> None:
        """Give the kernel its own method back; where somebody wrapped ours in turn, ours only passes through."""
        if vars(self._kernel).get("do_shutdown") is self._wrapper:
            del self._kernel.do_shutdown
        self._attached = False
