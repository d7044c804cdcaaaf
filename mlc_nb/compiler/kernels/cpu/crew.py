"""The crew: threads that share the parallel loops of a step, as native code of our own.

Compiled kernels hand a parallel loop to the function behind ``__TVMBackendParallelLaunch``. TVM's own pool gives each
thread one fixed share and yields while it waits: where another program holds one of the cores, every loop then waits
for that program's time slice. In ``crew.ll`` each thread begins with its own share, cut into small tasks, and takes
from the others' when it is done, so that a thread which the system has put aside is waited for only if it was in the
middle of a task; and threads that wait spin without yielding, for a short while, and then sleep.

No order of sums depends on who runs a task, so answers do not depend on it either (design, decision 5).

It is LLVM IR because TIR has no atomic operations, and because TVM brings LLVM where there is no C compiler.
`mlc_nb.runtime.crew` gives it memory and threads.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import tvm

if TYPE_CHECKING:
    from mlc_nb.compiler.kernels.cpu.isa import IsaLevel

__all__ = ["write_crew"]

# By the architecture in front of the triple: how a spinning thread spares the other one of its core, and the number
# of the futex system call.
_ARCHITECTURES = {
    "x86_64": {"pause": "@llvm.x86.sse2.pause()", "pause_declaration": "@llvm.x86.sse2.pause()", "futex": "202"},
    "aarch64": {"pause": "@llvm.aarch64.hint(i32 1)", "pause_declaration": "@llvm.aarch64.hint(i32)", "futex": "98"},
}


def write_crew(level: IsaLevel, path: Path) -> None:
    """Compile the crew for a level's operating system and architecture into the object file ``path``."""
    # Metadata writes a quote as \22.
    target = json.dumps({"kind": "llvm", "mtriple": level.triple}).replace('"', r"\22")
    source = resources.files(__package__).joinpath("crew.ll").read_text(encoding="utf-8")
    words = _ARCHITECTURES[level.triple.split("-", 1)[0]]
    code = Template(source).substitute(words, triple=level.triple, target=target)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "crew.ll"
        file.write_text(code, encoding="utf-8")
        module = tvm.get_global_func("ffi.Module.load_from_file.ll")(str(file), "ll")
    module.write_to_file(str(path), "o")
