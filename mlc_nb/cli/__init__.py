"""The ``mlc-nb`` command: talk to a model in a terminal, look after the cache, check the machine."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from mlc_nb import __version__
from mlc_nb.errors import MLCError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 1 after an error, 2 for a wrong command line, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except MLCError as error:
        print(f"mlc-nb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`mlc-nb ... | head`) has enough; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlc-nb", description="Run large language models in this process.")
    parser.add_argument("--version", action="version", version=f"mlc-nb {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    chat = commands.add_parser("chat", help="talk to a model; Ctrl-C stops the answer, Ctrl-D ends the program")
    chat.add_argument("-m", "--model", help="alias, PYPI:// id or path of a .gguf file (default: smollm2)")
    chat.add_argument("--prompt", help="ask this and end; without it, and with input from a pipe, ask what comes in")
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="most tokens in an answer")
    chat.add_argument("--temperature", type=float, metavar="T", help="0 is always the likeliest token (default: 1)")
    chat.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens with this share")
    chat.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    chat.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; repeatable")
    chat.set_defaults(run=_chat)

    compiling = commands.add_parser("compile", help="compile a model ahead of its first use, as when an image is built")
    compiling.add_argument("-m", "--model", help="alias, PYPI:// id or path of a .gguf file (default: smollm2)")
    level = compiling.add_mutually_exclusive_group()
    level.add_argument("--isa", metavar="LEVEL", help="such as avx2, or sm_90 for a GPU (default: this CPU's best)")
    level.add_argument("--all-levels", action="store_true", help="every level of this kind of processor")
    compiling.add_argument(
        "--activation-dtype",
        default="auto",
        metavar="TYPE",
        help="as in EngineConfig: auto, float32 or an integer type (default: auto)",
    )
    compiling.add_argument("-o", "--output", metavar="FOLDER", help="write here, for model_lib, and not to the cache")
    compiling.set_defaults(run=_compile, parser=compiling)

    cache = commands.add_parser("cache", help="list or remove cached models and compiled libraries")
    actions = cache.add_subparsers(title="actions", metavar="ACTION")
    cache.set_defaults(run=_list_cache)
    actions.add_parser("list", help="show what is cached and how large it is").set_defaults(run=_list_cache)
    remove = actions.add_parser("remove", help="remove models by name, or more with an option")
    remove.add_argument("models", nargs="*", metavar="MODEL", help="as `mlc-nb cache list` shows it, or an alias")
    remove.add_argument("--models", dest="all_models", action="store_true", help="every cached model")
    remove.add_argument("--libraries", action="store_true", help="every compiled library")
    remove.set_defaults(run=_remove_from_cache, parser=remove)

    processes = commands.add_parser("ps", help="list the engines of every kernel and program of yours on this machine")
    processes.set_defaults(run=_processes)

    doctor = commands.add_parser("doctor", help="check whether models can run on this machine")
    doctor.set_defaults(run=_doctor)
    return parser


def _chat(options: argparse.Namespace) -> int:
    from mlc_nb.cli.chat import chat

    names = ("max_tokens", "temperature", "top_p", "seed", "stop")
    sampling = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return chat(options.model, options.prompt, options.system, sampling)


def _compile(options: argparse.Namespace) -> int:
    from mlc_nb.cli.compile import compile_model

    if options.all_levels and options.output:
        options.parser.error("--output takes one level, not --all-levels")
    return compile_model(options.model, options.isa, options.all_levels, options.activation_dtype, options.output)


def _list_cache(_options: argparse.Namespace) -> int:
    from mlc_nb.cli.cache import list_cache

    return list_cache()


def _remove_from_cache(options: argparse.Namespace) -> int:
    from mlc_nb.cli.cache import remove

    if not (options.models or options.all_models or options.libraries):
        options.parser.error("name a model, or give --models or --libraries")
    return remove(options.models, all_models=options.all_models, libraries=options.libraries)


def _processes(_options: argparse.Namespace) -> int:
    from mlc_nb.cli.processes import list_processes

    return list_processes()


def _doctor(_options: argparse.Namespace) -> int:
    from mlc_nb.doctor import examine

    return examine()
