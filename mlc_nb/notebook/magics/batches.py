"""Several prompts, models or samplings at once: ``%%mlc_batch`` and ``%%mlc_compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_cell_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, argument_group, magic_arguments

from mlc_nb.notebook.magics.common import MagicsOfShell
from mlc_nb.notebook.option_groups import (
    SAMPLING_NAMES,
    model_option,
    output_option,
    sampling_fields,
    sampling_options,
)
from mlc_nb.notebook.options import not_empty, parse_options

if TYPE_CHECKING:
    import argparse

    from mlc_nb.notebook.comparison import Variant

__all__ = ["BatchMagics"]

MOST_VARIANTS = 6


@magics_class
class BatchMagics(MagicsOfShell):
    """Ask many things, or many models, at once."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @model_option
    @argument("--system", metavar="TEXT", help="System prompt of every prompt")
    @argument("--data", metavar="NAME", help="A DataFrame, Series or list: a prompt for each row")
    @argument("--column", metavar="NAME", help="With --data and no template: the column that holds the prompts")
    @argument("--into", metavar="COLUMN", help="With a DataFrame: write the answers into this column of it")
    @argument("--concurrency", type=int, metavar="N", help="Most requests at a time. Default: what the engine runs")
    @sampling_options()
    @argument_group("answers")
    @argument("--json-schema", type=not_empty, metavar="NAME_OR_FILE", help="Hold every answer to this schema")
    @output_option
    @line_cell_magic
    def mlc_batch(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> None:
        """Answer many prompts at once: one a line of the cell, or one a row of a DataFrame or list.

        With ``--data`` the text of the cell is a template in which ``{column}`` stands for the value of the row (in a
        list of plain values, ``{item}``). The answers come in the order of the prompts; one that fails is a row with
        its error and ends no other. The result (``texts``, ``errors``, one item a prompt) is in ``_`` and ``Out``. In
        Python, ``await mlc_nb.batch(prompts)`` does the same.

        Examples::

            %%mlc_batch --max-tokens 30 --temperature 0 -o capitals
            What is the capital of France?
            What is the capital of Italy?

            %%mlc_batch --data reviews --into mood --max-tokens 5
            Is this review positive or negative? One word. {text}

            %mlc_batch --data questions --column question -o answers
        """
        with self._state.working():
            options = parse_options(self.mlc_batch, line)
            if options is None:
                return
            variables = self._state.variables(local_ns)
            prompts, data = _prompts(options, None if cell is None else self._state.cells.prompt(cell), variables)
            fields = sampling_fields(options, self._state.settings)
            if options.json_schema is not None:
                from mlc_nb.notebook.json_schema import json_schema_format

                fields["response_format"] = json_schema_format(options.json_schema, variables)
            system = options.system if options.system is not None else self._state.settings.system
            result = self._state.batches.run(
                prompts,
                options.model or self._state.settings.model,
                system,
                options.concurrency,
                fields,
                silent=options.silent,
                output=options.output,
            )
            if options.into is not None:
                data[options.into] = result.texts

    @no_var_expand
    @magic_arguments("%mlc_compare")
    @argument(
        "-m",
        "--model",
        type=not_empty,
        action="append",
        help="A model; given again, another column. Default: %%mlc_config model",
    )
    @argument("--system", action="append", metavar="TEXT", help="System prompt; given again, another column")
    @sampling_options("append")
    @argument_group("answers")
    @output_option
    @cell_magic
    def mlc_compare(self, line: str, cell: str) -> None:
        """Stream the answers of several models, or of several samplings, side by side.

        An option that is given several times makes a column each time; one that is given once holds for all columns.
        Nothing is sent before the question and nothing is remembered. The comparison (``answers``, ``labels``) is in
        ``_`` and ``Out``.

        Examples::

            %%mlc_compare -m smollm2 -m ~/models/other.gguf --temperature 0
            Explain rain in one sentence.

            %%mlc_compare --temperature 0 --temperature 1.2 --seed 1 --max-tokens 60
            Tell me about the sea.
        """
        with self._state.working():
            options = parse_options(self.mlc_compare, line)
            if options is None:
                return
            prompt = self._state.cells.prompt(cell)
            if not prompt.strip():
                raise UsageError("mlc_compare: the cell has no prompt below its first line.")
            from mlc_nb.notebook.comparison import compare

            variants = self._variants(options, prompt)
            compare(self._state.shell, self._state.engines, variants, silent=options.silent, output=options.output)

    def _variants(self, options: argparse.Namespace, prompt: str) -> list[Variant]:
        from mlc_nb.notebook.comparison import Variant

        settings = self._state.settings
        given = {name: getattr(options, name) for name in ("model", "system", *SAMPLING_NAMES)}
        values: dict[str, list[Any]] = {name: value for name, value in given.items() if value is not None}
        counts = {name: len(value) for name, value in values.items() if len(value) > 1}
        if not counts:
            raise UsageError(
                "mlc_compare: nothing differs. Give -m, or an option such as --temperature, more than once"
            )
        count = max(counts.values())
        uneven = next((name for name, number in counts.items() if number != count), None)
        if uneven is not None:
            spelled = "--" + uneven.replace("_", "-")
            raise UsageError(f"mlc_compare: {spelled} is given {counts[uneven]} times; give it once or {count} times")
        if count > MOST_VARIANTS:
            raise UsageError(f"mlc_compare: at most {MOST_VARIANTS} answers fit side by side, asked for {count}")
        variants = []
        for index in range(count):
            chosen = {name: value[index if len(value) > 1 else 0] for name, value in values.items()}
            model = chosen.pop("model", settings.model)
            system = chosen.pop("system", settings.system)
            before = [] if system is None else [{"role": "system", "content": system}]
            fields = {**settings.sampling(), **chosen, "messages": [*before, {"role": "user", "content": prompt}]}
            if options.stop is not None:
                fields["stop"] = options.stop
            differs = [f"{name.replace('_', ' ')} {values[name][index]}" for name in counts if name != "model"]
            variants.append(Variant(" · ".join([model, *differs]), model, fields))
        return variants


def _prompts(options: argparse.Namespace, text: str | None, variables: dict[str, Any]) -> tuple[list[str], Any]:
    """Return the prompts, and the data that they come from."""
    from mlc_nb.notebook.batch_cell import column_of, prompts_of_rows, rows_of

    has_text = text is not None and bool(text.strip())
    if options.data is None:
        if options.column is not None or options.into is not None:
            raise UsageError("--column and --into need --data NAME")
        prompts = [line.strip() for line in (text or "").split("\n") if line.strip()]
        if not prompts:
            raise UsageError("mlc_batch: there is no prompt. Write one a line below %%mlc_batch, or give --data NAME")
        return prompts, None
    if options.data not in variables:
        raise UsageError(f"--data {options.data}: there is no such variable")
    data = variables[options.data]
    rows = rows_of(options.data, data)
    if options.into is not None and not hasattr(data, "columns"):
        raise UsageError(f"--into needs a DataFrame, {options.data} is a {type(data).__name__}; use -o NAME")
    if has_text and options.column is not None:
        raise UsageError("give --column or a template in the cell, not both")
    if not rows:
        raise UsageError(f"--data {options.data}: it is empty")
    return (prompts_of_rows(text or "", rows) if has_text else column_of(rows, options.column)), data
