"""Looking after engines: load, unload, status, models, settings, and the check of the machine."""

from __future__ import annotations

import ast
import contextlib
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from traitlets import TraitError

from mlc_nb.notebook.magics.common import MagicsOfShell
from mlc_nb.notebook.one_line import one_line_errors
from mlc_nb.notebook.options import not_empty, parse_options

if TYPE_CHECKING:
    from mlc_nb.notebook.settings import MLCMagics

__all__ = ["EngineMagics"]


@magics_class
class EngineMagics(MagicsOfShell):
    """Look after the engines of this kernel."""

    @no_var_expand
    @magic_arguments()
    @argument("model", nargs="?", type=not_empty, help="An alias, PYPI:// id or path. Default: %%mlc_config model")
    @line_magic
    def mlc_load(self, line: str) -> None:
        """Load a model now, so that the first answer does not wait for it.

        Examples::

            %mlc_load
            %mlc_load ~/models/my-model.gguf
        """
        with self._state.working():
            options = parse_options(self.mlc_load, line)
            if options is None:
                return
            from mlc_nb.notebook.stream_view import open_view

            model = options.model or self._state.settings.model
            view = open_view(self._state.shell, silent=options.silent)
            try:
                self._state.engines.get(model, view)
            except BaseException:
                view.finish("")
                raise
            view.wait_for(f"{model} is loaded")

    @no_var_expand
    @magic_arguments()
    @argument("model", nargs="?", type=not_empty, help="Model to unload; not needed where only one is loaded")
    @argument("--all", action="store_true", help="Unload every engine of this kernel")
    @line_magic
    def mlc_unload(self, line: str) -> None:
        """Terminate engines and give their memory back. Conversations are kept.

        Examples::

            %mlc_unload
            %mlc_unload --all
        """
        with self._state.working():
            options = parse_options(self.mlc_unload, line)
            if options is None:
                return
            from mlc_nb import registry

            if options.model is None and not registry.engines():
                print("nothing was loaded")
                return
            unloaded = registry.unload(options.model, all=options.all)
            print(f"unloaded {', '.join(unloaded)}")

    @no_var_expand
    @magic_arguments()
    @line_magic
    def mlc_status(self, line: str) -> None:
        """Show the engines of this kernel: state, memory, KV pages, requests, speed.

        Examples::

            %mlc_status
        """
        with self._state.working():
            if parse_options(self.mlc_status, line) is None:
                return
            from mlc_nb import registry
            from mlc_nb.notebook.status_view import status_bundle

            rows = registry.engines()
            devices = dict.fromkeys(row.device for row in rows)
            self._state.show(status_bundle(rows, [registry.memory_table(device) for device in devices]))

    @no_var_expand
    @magic_arguments()
    @line_magic
    def mlc_models(self, line: str) -> None:
        """List the models that can be named: aliases, what is cached with its size, what is loaded.

        A model that is not cached is fetched when it is first used. The path of any .gguf file works as well.

        Examples::

            %mlc_models
        """
        with self._state.working():
            if parse_options(self.mlc_models, line) is None:
                return
            from mlc_nb.notebook.models_view import models_bundle

            self._state.show(models_bundle())

    @no_var_expand
    @magic_arguments()
    @argument("setting", nargs="?", help="Default: all of them")
    @argument("value", nargs="*", help="Its new value, as Python writes it; text needs no quotes")
    @line_magic
    def mlc_config(self, line: str) -> None:
        """Show or change the settings of the magics; an option of a magic goes before its setting.

        ``%config MLCMagics.temperature = 0.2`` does the same. What is changed holds until the kernel ends; a line such
        as ``c.MLCMagics.model = "..."`` in ``ipython_config.py`` holds for every kernel.

        Examples::

            %mlc_config
            %mlc_config temperature 0.2
            %mlc_config system You are brief.
            %mlc_config system None
        """
        with one_line_errors():
            setting, _, value = line.strip().partition(" ")
            options = parse_options(self.mlc_config, setting)
            if options is None:
                return
            settings = self._state.settings
            names = sorted(settings.trait_names(config=True))
            if options.setting is None:
                from mlc_nb.table import table_bundle

                rows = [(name, repr(getattr(settings, name)), settings.traits()[name].help) for name in names]
                self._state.show(table_bundle(("setting", "value", "what it does"), rows))
                return
            if options.setting not in names:
                raise UsageError(f"%mlc_config: there is no setting {options.setting!r}. Settings: {', '.join(names)}")
            if value.strip():
                _assign(settings, options.setting, value.strip())
            print(f"{options.setting} = {getattr(settings, options.setting)!r}")

    @no_var_expand
    @magic_arguments()
    @line_magic
    def mlc_doctor(self, line: str) -> None:
        """Check whether models can run on this machine, and say what is missing.

        Examples::

            %mlc_doctor
        """
        with self._state.working():
            if parse_options(self.mlc_doctor, line) is None:
                return
            from mlc_nb.doctor import examine

            examine()


def _assign(settings: MLCMagics, name: str, text: str) -> None:
    """Set a trait to what ``text`` means to Python, or to the text where it takes no such value."""
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, TraitError):
        setattr(settings, name, ast.literal_eval(text))
        return
    try:
        setattr(settings, name, text)
    except TraitError as error:
        raise UsageError(f"%mlc_config {name}: {error}") from None
