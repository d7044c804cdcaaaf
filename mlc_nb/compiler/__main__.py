"""The compiler's child process: a `CompileRequest` as JSON on standard input, a folder to write to as its argument.

Writes ``model.ro``, ``model.o``, ``crew.o`` and ``metadata.json``. An error that has a message for the user goes to
standard output as JSON (``error``, ``message``) with exit status 3; anything else ends with a traceback on standard
error.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from mlc_nb.errors import MLCError
from mlc_nb.models.registry import architecture_module
from mlc_nb.weights.cache import disk_errors
from mlc_nb.weights.plan import CompileRequest


def main() -> int:
    """Compile the request; the exit status."""
    directory = Path(sys.argv[1])
    request = CompileRequest.model_validate_json(sys.stdin.buffer.read())
    try:
        family = importlib.import_module(architecture_module(request.architecture))
        from mlc_nb.compiler.kernels.cpu.crew import write_crew
        from mlc_nb.compiler.kernels.cpu.isa import isa_level
        from mlc_nb.compiler.pipeline import build_library

        model, metadata = family.build(request)
        level = isa_level(request.isa)
        with disk_errors(directory):
            build_library(model, model.forward_spec(), level, directory / "model.ro", directory / "model.o")
            write_crew(level, directory / "crew.o")
            (directory / "metadata.json").write_text(metadata.model_dump_json(indent=1), encoding="utf-8")
    except MLCError as error:
        json.dump({"error": type(error).__name__, "message": str(error)}, sys.stdout)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
