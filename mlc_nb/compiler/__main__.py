"""The compiler's child process: a `CompileRequest` as JSON on standard input, a folder to write to as its argument.

For a CPU writes ``model.ro``, ``model.o`` and ``crew.o``, for a GPU ``model.cubin`` and ``plan.json``, and for both
``metadata.json``. An error that has a message for the user goes to
standard output as JSON (``error``, ``message``) with exit status 3; anything else ends with a traceback on standard
error.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import MLCError
from mlc_nb.models.registry import architecture_module
from mlc_nb.weights.cache import disk_errors
from mlc_nb.weights.plan import CompileRequest

if TYPE_CHECKING:
    from mlc_nb.weights.plan import LibraryMetadata


def main() -> int:
    """Compile the request; the exit status."""
    directory = Path(sys.argv[1])
    request = CompileRequest.model_validate_json(sys.stdin.buffer.read())
    try:
        family = importlib.import_module(architecture_module(request.architecture, for_cuda=request.for_cuda))
        compiled = (_compile_for_cuda if request.for_cuda else _compile_for_cpu)(family, request, directory)
        with disk_errors(directory):
            (directory / "metadata.json").write_text(compiled.model_dump_json(indent=1), encoding="utf-8")
    except MLCError as error:
        json.dump({"error": type(error).__name__, "message": str(error)}, sys.stdout)
        return 3
    return 0


def _compile_for_cpu(family: Any, request: CompileRequest, directory: Path) -> LibraryMetadata:
    from mlc_nb.compiler.kernels.cpu.crew import write_crew
    from mlc_nb.compiler.kernels.cpu.isa import isa_level
    from mlc_nb.compiler.pipeline import build_library

    model, metadata = family.build(request)
    level = isa_level(request.isa)
    with disk_errors(directory):
        build_library(model, model.forward_spec(), level, directory / "model.ro", directory / "model.o")
        write_crew(level, directory / "crew.o")
    described: LibraryMetadata = metadata
    return described


def _compile_for_cuda(family: Any, request: CompileRequest, directory: Path) -> LibraryMetadata:
    from mlc_nb.compiler.cuda_pipeline import build_cuda_library
    from mlc_nb.compiler.toolchain import check_architecture

    check_architecture(request.isa)
    plan, kernels, metadata = family.build(request)
    with disk_errors(directory):
        build_cuda_library(plan, kernels, request.isa, directory / "model.cubin", directory / "plan.json")
    described: LibraryMetadata = metadata
    return described


if __name__ == "__main__":
    sys.exit(main())
