"""What a batch cell does: prompts from its text or from data of the user, a bar while they are answered, a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from mlc_nb.batch.result import BatchItem, BatchResult
from mlc_nb.batch.run import batch
from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.errors import RequestAborted
from mlc_nb.notebook.interpolation import interpolate
from mlc_nb.notebook.interrupt import StopRequest
from mlc_nb.notebook.kept import keep
from mlc_nb.notebook.off_loop import run_off_loop
from mlc_nb.notebook.stream_view import open_view
from mlc_nb.progress import item_bar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.notebook.cell_engines import CellEngines
    from mlc_nb.notebook.settings import MLCMagics

__all__ = ["BatchCells", "column_of", "prompts_of_rows", "rows_of"]

_ITEM = "item"


class BatchCells:
    """The batch cells of one shell."""

    def __init__(self, shell: InteractiveShell, settings: MLCMagics, engines: CellEngines) -> None:
        self._shell = shell
        self._settings = settings
        self._engines = engines

    def run(
        self,
        prompts: Sequence[Any],
        model: str,
        system: str | None,
        concurrency: int | None,
        fields: Mapping[str, Any],
        *,
        silent: bool,
        output: str | None,
    ) -> BatchResult:
        """Answer ``prompts``, show the answers as one table, and keep the `BatchResult`.

        Raises
        ------
        MLCError
            The model cannot be loaded, or an argument is invalid; what is wrong with one prompt is in its row.
        KeyboardInterrupt
            The user stopped it; the result has what was answered, and RequestAborted for the rest.
        """
        view = open_view(self._shell, silent=silent)
        try:
            self._engines.get(model, view)
        finally:
            view.finish("")
        done: list[BatchItem] = []
        started = time.perf_counter()

        async def work() -> BatchResult:
            engine = AsyncMLCEngine(model, **self._settings.engine_arguments())
            async with engine:
                return await batch(
                    prompts,
                    engine=engine,
                    system=system,
                    concurrency=concurrency,
                    progress=False,
                    on_item=done.append,
                    **fields,
                )

        with StopRequest() as stop, item_bar("Answering", total=len(prompts), enabled=not silent) as advance:
            told = 0

            def tick() -> None:
                nonlocal told
                while told < len(done):
                    told += 1
                    advance()

            result = run_off_loop(work, stop, tick)
        if result is None:
            result = _cut_short(prompts, done, time.perf_counter() - started)
        keep(self._shell, result, output)
        if not silent:
            self._shell.display_pub.publish(data=result._repr_mimebundle_(), metadata={})
        if stop.interrupted:
            raise KeyboardInterrupt(f"the batch was stopped after {len(done)} of {len(prompts)} answers")
        return result


def _cut_short(prompts: Sequence[Any], done: Sequence[BatchItem], seconds: float) -> BatchResult:
    by_index = {item.index: item for item in done}
    stopped = RequestAborted("stopped before it was answered")
    return BatchResult(
        (by_index.get(index) or BatchItem(index, prompt, error=stopped) for index, prompt in enumerate(prompts)),
        seconds,
    )


def rows_of(name: str, value: Any) -> list[Mapping[str, Any]]:
    """Return the rows of a DataFrame or the like, by column; the elements of a list are rows of one column, ``item``.

    Raises
    ------
    UsageError
        ``value`` is nothing that has rows.
    """
    if hasattr(value, "columns") and hasattr(value, "to_dict"):
        rows: list[Mapping[str, Any]] = value.to_dict("records")
        return rows
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
        raise UsageError(f"--data {name}: wanted a DataFrame, a Series or a list, found {type(value).__name__}")
    return [element if isinstance(element, dict) else {_ITEM: element} for element in value]


def column_of(rows: Sequence[Mapping[str, Any]], column: str | None) -> list[str]:
    """Return one column as prompts; None takes the only one.

    Raises
    ------
    UsageError
        There is no such column, or several and none was named.
    """
    columns = list(dict.fromkeys(str(key) for row in rows for key in row))
    if column is None and len(columns) != 1:
        raise UsageError(f"name one column with --column, or write a template below: {', '.join(columns)}")
    wanted = columns[0] if column is None else column
    missing = next((number for number, row in enumerate(rows) if wanted not in row), None)
    if missing is not None:
        raise UsageError(f"row {missing} has no column {wanted!r}. Columns: {', '.join(columns)}")
    return [str(row[wanted]) for row in rows]


def prompts_of_rows(template: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the template once for each row, with ``{column}`` replaced by the row's value.

    Raises
    ------
    UsageError
        The template names no column, or one that a row does not have.
    """
    prompts = []
    for number, row in enumerate(rows):
        prompt, missed = interpolate(template, row)
        if missed:
            raise UsageError(f"row {number} has no column {missed[0]!r}. Columns: {', '.join(map(str, row))}")
        if prompt == template:
            raise UsageError(
                f"the template has no {{column}} in it, so all prompts are one. Columns: {', '.join(map(str, row))}"
            )
        prompts.append(prompt)
    return prompts
