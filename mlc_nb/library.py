"""Library bundles: compiled models in the cache, each made once by a child process and loaded in milliseconds.

For a CPU, ``model.ro`` is the VM executable and ``model.o`` the kernels' object file; for a GPU, ``model.cubin`` is the
kernels' machine code and ``plan.json`` says how they are launched. ``metadata.json`` says how to feed them and
``request.json`` what they were compiled from. ``manifest.json`` holds the hash of each, so that a damaged bundle is
seen and built again, and the versions that made them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from mlc_nb import errors
from mlc_nb.child import popen
from mlc_nb.cuda_wheels import COMPILING, require_packages
from mlc_nb.errors import CompileError, MLCError, ModelFormatError, ModelNotFoundError
from mlc_nb.progress import working
from mlc_nb.weights.cache import cache_root, disk_errors, exclusive, work_directory
from mlc_nb.weights.plan import CompileRequest, LibraryMetadata

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LibraryBundle", "compile_bundle", "library_root", "load_bundle", "open_bundle"]

_log = logging.getLogger(__name__)

_COMPILED_FOR_CPU = ("model.ro", "model.o", "crew.o", "metadata.json")
_COMPILED_FOR_CUDA = ("model.cubin", "plan.json", "metadata.json")
_REQUEST = "request.json"
_MANIFEST = "manifest.json"
_SOURCES = ("compiler", "models", "quantization", "weights/plan.py", "weights/launch_plan.py")
_LAST_LINES = 15


@dataclass(frozen=True)
class LibraryBundle:
    """A bundle that is there and whole."""

    directory: Path
    metadata: LibraryMetadata
    request: CompileRequest

    @property
    def executable(self) -> Path:
        """The VM executable."""
        return self.directory / "model.ro"

    @property
    def objects(self) -> tuple[Path, Path]:
        """The object files that are linked together: the kernels, and the threads that run them."""
        return self.directory / "model.o", self.directory / "crew.o"

    @property
    def machine_code(self) -> Path:
        """The kernels for a GPU."""
        return self.directory / "model.cubin"

    @property
    def launch_plan(self) -> Path:
        """How a GPU's kernels are launched."""
        return self.directory / "plan.json"


def library_root() -> Path:
    """The folder of all cached bundles."""
    return cache_root() / "libraries"


def open_bundle(request: CompileRequest, *, progress: bool = True) -> LibraryBundle:
    """The cached bundle for a request, compiled first if it is missing or damaged.

    Two processes that ask at once compile once.

    Raises
    ------
    CompileError
        If the compiler fails; the message holds its last lines.
    ModelFormatError
        If the compiler finds that the model cannot be run.
    MLCError
        If the cache cannot be written.
    """
    place = library_root() / _key(request)
    bundle = place / "bundle"
    found = _intact(bundle)
    if found is not None:
        return found
    with disk_errors(place), exclusive(place, waiting=nullcontext()):
        found = _intact(bundle)
        if found is not None:
            return found
        with work_directory(place) as work:
            compile_bundle(request, work / "bundle", progress=progress)
            shutil.rmtree(bundle, ignore_errors=True)
            (work / "bundle").replace(bundle)
        return load_bundle(bundle)


def compile_bundle(request: CompileRequest, directory: Path, *, progress: bool = True) -> None:
    """Compile a request into ``directory``, in a child process that is killed if this call is interrupted.

    Raises
    ------
    CompileError, ModelFormatError
        As in `open_bundle`.
    MLCError
        If the folder cannot be written.
    """
    with disk_errors(directory):
        directory.mkdir(parents=True)
        try:
            _run_compiler(request, directory, progress)
            (directory / _REQUEST).write_text(request.model_dump_json(indent=1), encoding="utf-8")
            files = {name: _digest(directory / name) for name in (*_compiled(request), _REQUEST)}
            manifest = {"toolchain": _toolchain(request), "files": files}
            (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _run_compiler(request: CompileRequest, directory: Path, progress: bool) -> None:
    try:
        child = popen(
            "mlc_nb.compiler",
            [str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise CompileError(f"the compiler's process cannot be started: {error}") from error
    with child:
        try:
            processor = "GPU" if request.for_cuda else "processor"
            with working(f"Compiling the model for this {processor} (once)", enabled=progress) as tick:
                stdout, stderr = _communicate(child, request.model_dump_json(), tick)
        except BaseException:
            child.kill()
            child.wait()  # after Ctrl-C, leaving the block would wait for a moment only
            raise
    if child.returncode != 0 or not all((directory / name).is_file() for name in _compiled(request)):
        raise _failure(child.returncode, stdout, stderr)


def load_bundle(directory: Path) -> LibraryBundle:
    """Check a bundle's files and read its metadata.

    Raises
    ------
    ModelNotFoundError
        If the folder or one of its files is missing.
    ModelFormatError
        If a file is damaged or of another version.
    """
    _check_there(directory, ("metadata.json", _REQUEST, _MANIFEST))
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        toolchain, digests = manifest["toolchain"], manifest["files"]
        damaged = [
            name for name in digests if (directory / name).is_file() and digests[name] != _digest(directory / name)
        ]
        damaged += [name for name in ("metadata.json", _REQUEST) if name not in digests]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelFormatError(f"the model library {directory} is damaged ({_MANIFEST}); compile it again") from error
    if damaged:
        raise ModelFormatError(f"the model library {directory} is damaged ({', '.join(damaged)}); compile it again")
    request = CompileRequest.model_validate_json((directory / _REQUEST).read_bytes())
    _check_there(directory, _compiled(request))
    if toolchain != _toolchain(request):
        raise ModelFormatError(
            f"the model library {directory} was made by another version of mlc_nb or of its compiler; compile it again"
        )
    return LibraryBundle(
        directory, LibraryMetadata.model_validate_json((directory / "metadata.json").read_bytes()), request
    )


def _check_there(directory: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if not (directory / name).is_file():
            raise ModelNotFoundError(
                f"{directory} is no model library: it has no {name}. Leave model_lib out to have one compiled."
            )


def _intact(directory: Path) -> LibraryBundle | None:
    if not directory.is_dir():
        return None
    try:
        return load_bundle(directory)
    except (MLCError, OSError) as error:
        _log.warning("A cached model library is built again: %s", error)
        return None


def _communicate(child: subprocess.Popen[str], text: str, tick: Callable[[], None]) -> tuple[str, str]:
    """Wait in short slices, so that Ctrl-C and the progress display get their turns."""
    output = _output_so_far(child, text)
    while output is None:
        tick()
        output = _output_so_far(child, None)
    return output


def _output_so_far(child: subprocess.Popen[str], text: str | None) -> tuple[str, str] | None:
    """Both outputs of the child if it ends within a tenth of a second."""
    try:
        return child.communicate(text, timeout=0.1)
    except subprocess.TimeoutExpired:
        return None


def _failure(status: int, stdout: str, stderr: str) -> MLCError:
    """The child's own error where it reported one, else what its end and its last lines tell."""
    try:
        report = json.loads(stdout.strip().rpartition("\n")[2])
        kind: type[MLCError] = getattr(errors, report["error"])
        if issubclass(kind, MLCError):
            return kind(report["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    lines = "\n".join(stderr.strip().splitlines()[-_LAST_LINES:])
    printed = f"Its last lines:\n{lines}" if lines else "It printed nothing."
    return CompileError(f"the compiler {end} before the model library was made. {printed}")


def _key(request: CompileRequest) -> str:
    """Hash of everything that changes the result."""
    content = {"request": request.model_dump(mode="json"), **_toolchain(request)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _compiled(request: CompileRequest) -> tuple[str, ...]:
    """The files that the compiler writes."""
    return _COMPILED_FOR_CUDA if request.for_cuda else _COMPILED_FOR_CPU


def _toolchain(request: CompileRequest) -> dict[str, str]:
    """What makes libraries: a library of another toolchain may expect other arguments.

    Raises
    ------
    DeviceUnavailableError
        If a package that compiles for CUDA is missing.
    """
    packages = ("apache-tvm", "apache-tvm-ffi")
    if request.for_cuda:
        packages = COMPILING
        require_packages(packages, "compiling for CUDA")
    return {
        **{package: version(package) for package in packages},
        "platform": sys.platform,
        "sources": _sources_digest(),
    }


@cache
def _sources_digest() -> str:
    """Hash of the code that makes bundles, so that no upgrade uses an old one."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for source in _SOURCES:
        place = package / source
        for path in sorted([*place.rglob("*.py"), *place.rglob("*.cuh")]) if place.is_dir() else [place]:
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
