"""Many prompts at once: ``await mlc_nb.batch(["...", "..."], max_tokens=40)``; see `mlc_nb.batch.run.batch`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mlc_nb.batch.result import BatchResult


class _CallablePackage(ModuleType):
    """``mlc_nb.batch`` is the name of this package as well as of what it does, so the package can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Coroutine[Any, Any, BatchResult]:
        """Answer many requests; see `mlc_nb.batch.run.batch`."""
        from mlc_nb.batch.run import batch

        return batch(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
