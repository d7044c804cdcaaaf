"""Library bundles: made by a child process that may die in any way, cached whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from mlc_nb import library
from mlc_nb.engine.model import compile_request, load_model
from mlc_nb.errors import CompileError, DeviceUnavailableError, MLCError, ModelFormatError, ModelNotFoundError
from mlc_nb.library import compile_bundle, load_bundle, open_bundle
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.isa import ISA_VARIABLE, host_isa, runnable_isas
from mlc_nb.runtime.step import SequenceSlice
from mlc_nb.weights.gguf_file import GGUFFile
from tests.models.tiny_llama import TinyLlama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlc_nb.weights.plan import CompileRequest

# The model and the level that compile fastest: here it is all about what happens around the compiler.
SMALLEST = TinyLlama(layers=1, hidden=32, inner=32, heads=4, kv_heads=1)
ISA = "avx2" if "avx2" in runnable_isas() else runnable_isas()[0]
CONFIG = EngineConfig(activation_dtype="float32", max_single_sequence_length=64)
REPOSITORY = str(Path(__file__).resolve().parent.parent)
FILES = ("model.ro", "model.o", "crew.o", "metadata.json", "request.json", "manifest.json")


def request_of(path: Path, isa: str | None = None) -> CompileRequest:
    with GGUFFile.open(path) as file:
        return compile_request(file, CONFIG, isa)


@pytest.fixture(scope="module", autouse=True)
def _level() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(ISA_VARIABLE, ISA)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALLEST.write(tmp_path_factory.mktemp("model") / "smallest.gguf")


@pytest.fixture(scope="module")
def whole_cache(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model's bundle, compiled with no program to be found on the PATH."""
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLC_NB_HOME", str(home))
        environment.setenv("PATH", "")
        open_bundle(request_of(model), progress=False)
    return home


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    home = tmp_path / "cache"
    monkeypatch.setenv("MLC_NB_HOME", str(home))
    return home


@pytest.fixture
def filled_cache(cache: Path, whole_cache: Path) -> Path:
    """A cache of the test's own that holds the model's bundle."""
    shutil.copytree(whole_cache, cache)
    return cache


@pytest.fixture
def boot_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have every compiler child run some code before anything else."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def install(code: str) -> None:
        indented = "\n".join(f"    {line}" for line in code.splitlines())
        (folder / "sitecustomize.py").write_text(f"import sys\nif 'mlc_nb.compiler' in sys.orig_argv:\n{indented}\n")

    return install


def bundles(home: Path) -> list[Path]:
    """Bundles and unfinished work in a cache."""
    return [path for path in home.rglob("*") if path.is_dir() and path.parent.parent == home / "libraries"]


def snapshot(home: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in home.rglob("*")}


def compilers() -> list[psutil.Process]:
    """Compiler children of this process that are still there."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.is_running() and "mlc_nb.compiler" in child.cmdline()]


def wait_for_compiler() -> psutil.Process:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := compilers():
            return found[0]
        time.sleep(0.01)
    raise AssertionError("no compiler was started")


# -- what a bundle is


def test_a_bundle_says_what_it_is(filled_cache: Path, model: Path) -> None:
    request = request_of(model)
    bundle = open_bundle(request, progress=False)
    assert bundle.directory.is_relative_to(filled_cache)
    assert bundle.request == request
    assert bundle.metadata.isa == host_isa()
    assert bundle.metadata.activation_dtype == "float32"
    assert sorted(path.name for path in bundle.directory.iterdir()) == sorted(FILES)
    assert load_bundle(bundle.directory) == bundle
    assert bundle.executable.is_file()
    assert all(path.is_file() for path in bundle.objects)


def test_an_intact_bundle_is_opened_without_writing(filled_cache: Path, model: Path, boot_code: Any) -> None:
    boot_code("raise SystemExit('the compiler was started')")
    for path in [filled_cache, *filled_cache.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(filled_cache)
    open_bundle(request_of(model), progress=False)
    assert snapshot(filled_cache) == before
    for path in [filled_cache, *filled_cache.rglob("*")]:
        path.chmod(0o755)


def test_the_key_changes_with_every_input(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(model)
    others = [
        request.model_copy(update=update)
        for update in (
            {"architecture": "other"},
            {"isa": "neon-dot"},
            {"activation_dtype": "int8"},
            {"hyperparameters": {**request.hyperparameters, "context_length": 1024}},
            {"hyperparameters": {**request.hyperparameters, "rope.freq_base": 10000}},
            {"tensors": {**request.tensors, "token_embd.weight": ("F16", (50, 32))}},
            {"tensors": {**request.tensors, "token_embd.weight": ("F32", (51, 32))}},
        )
    ]
    keys = [library._key(each) for each in [request, *others]]
    with monkeypatch.context() as patch:
        patch.setattr(library, "version", lambda _: "99")
        keys.append(library._key(request))
    with monkeypatch.context() as patch:
        patch.setattr(library, "_sources_digest", lambda: "other sources")
        keys.append(library._key(request))
    assert len(set(keys)) == len(keys)
    assert library._key(request_of(model)) == keys[0]


# -- damage


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "deleted"])
@pytest.mark.usefixtures("filled_cache")
def test_damage_is_seen(model: Path, name: str, damage: str) -> None:
    bundle = open_bundle(request_of(model), progress=False)
    hurt(bundle.directory / name, damage)
    # A flipped bit of the manifest is in some file's hash.
    named = "damaged" if (name, damage) == ("manifest.json", "flipped") else re.escape(name)
    with pytest.raises((ModelFormatError, ModelNotFoundError), match=named):
        load_bundle(bundle.directory)
    assert library._intact(bundle.directory) is None


def hurt(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "deleted":
        path.unlink()
        return
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes({"truncated": data[:-7], "emptied": b"", "flipped": data}[damage])


def test_a_damaged_bundle_is_built_again(filled_cache: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = open_bundle(request_of(model), progress=False)
    wanted = {name: (bundle.directory / name).read_bytes() for name in FILES}
    hurt(bundle.directory / "model.o", "truncated")
    assert open_bundle(request_of(model), progress=False) == bundle
    assert "damaged (model.o)" in caplog.text
    assert {name: (bundle.directory / name).read_bytes() for name in FILES} == wanted
    assert len(bundles(filled_cache)) == 1


@pytest.mark.usefixtures("filled_cache")
def test_a_library_of_another_toolchain_is_refused(model: Path) -> None:
    directory = open_bundle(request_of(model), progress=False).directory
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["toolchain"]["apache-tvm"] = "0.1"
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelFormatError, match="by another version of mlc_nb or of its compiler; compile it again"):
        load_bundle(directory)


# -- children that end badly

ENDINGS = {
    "a segmentation fault": (
        "import ctypes\nctypes.string_at(0)",
        r"was killed by signal 11 before the model library was made. It printed nothing",
    ),
    "garbage": (
        "import os\nos.write(1, bytes(range(256)))\nos.write(2, b'\\xff\\xfe words \\x00')\nos._exit(3)",
        r"ended with status 3 .* words ",
    ),
    "a report that is none": ("import os\nos.write(1, b'[1, 2]')\nos._exit(3)", r"ended with status 3"),
    "an error that is none": (
        'import os\nos.write(1, b\'{"error": "annotations", "message": 1}\')\nos._exit(3)',
        r"ended with status 3",
    ),
    "success without files": ("import os\nos._exit(0)", r"ended with status 0 before the model library was made"),
    "a traceback": ("raise RuntimeError('no such luck')", r"(?s)RuntimeError: no such luck"),
    "an exhausted memory": ("import os\nos.write(2, b'x' * 1_000_000)\nos.abort()", r"was killed by signal 6"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_becomes_of_the_compiler(cache: Path, model: Path, boot_code: Any, ending: str) -> None:
    code, message = ENDINGS[ending]
    if ending == "a traceback":
        code = f"import mlc_nb.models.registry as r\ndef fail(*_, **__):\n    {code}\nr.architecture_module = fail"
        boot_code(f"sys.path.append({REPOSITORY!r})\n{code}")
    else:
        boot_code(code)
    with pytest.raises(CompileError, match=f"(?s){message}"):
        open_bundle(request_of(model), progress=False)
    assert bundles(cache) == []
    assert compilers() == []


def test_a_killed_compiler_is_one_clear_error(cache: Path, model: Path) -> None:
    def kill() -> None:
        wait_for_compiler().kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(CompileError, match="was killed by signal 9"):
        open_bundle(request_of(model), progress=False)
    thread.join()
    assert bundles(cache) == []


def test_an_interrupt_ends_the_compiler_and_leaves_nothing(cache: Path, model: Path) -> None:
    def interrupt() -> None:
        wait_for_compiler()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        open_bundle(request_of(model), progress=False)
    thread.join()
    assert compilers() == []
    assert bundles(cache) == []


def test_two_processes_at_once_compile_once(cache: Path, model: Path, tmp_path: Path, boot_code: Any) -> None:
    count = tmp_path / "count"
    boot_code(f"open({str(count)!r}, 'a').write('compiled\\n')")
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {REPOSITORY!r})
from tests.test_library import request_of
from mlc_nb.library import open_bundle
print(open_bundle(request_of(Path({str(model)!r})), progress=False).directory)
"""
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert answers == {str(path) for path in bundles(cache)}
    assert count.read_text() == "compiled\n"


# -- disks


@pytest.mark.parametrize("share", [0.5, 1.1], ids=["executable", "objects"])
def test_a_full_disk_is_one_clear_error(cache: Path, whole_cache: Path, model: Path, share: float) -> None:
    """Files may grow no further than into one of the two; TVM itself does not notice."""
    (good,) = bundles(whole_cache)
    size = (good / "model.ro").stat().st_size
    assert (good / "model.o").stat().st_size > 1.2 * size
    code = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {REPOSITORY!r})
from tests.test_library import request_of
from mlc_nb.errors import MLCError
from mlc_nb.library import open_bundle
resource.setrlimit(resource.RLIMIT_FSIZE, ({int(size * share)}, {int(size * share)}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    open_bundle(request_of(Path({str(model)!r})), progress=False)
except MLCError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "disk full?" in done.stdout or "File too large" in done.stdout
    assert bundles(cache) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MLC_NB_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        MLCError, match=r"cache cannot be written: .*Not a directory.* set MLC_NB_HOME to a folder that is"
    ):
        open_bundle(request_of(model), progress=False)


def test_a_folder_of_one_s_own(tmp_path: Path, model: Path) -> None:
    with pytest.raises(CompileError, match="no ISA level 'sse9'"):
        compile_bundle(request_of(model, "sse9"), tmp_path / "bundle", progress=False)
    assert not (tmp_path / "bundle").exists()


# -- a library that the user names


@pytest.fixture(scope="module")
def foreign_library(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's library for a kind of processor that this is not."""
    foreign = "neon-dot" if "neon-dot" not in runnable_isas() else "avx2"
    directory = tmp_path_factory.mktemp("foreign") / "library"
    compile_bundle(request_of(model, foreign), directory, progress=False)
    return directory


@pytest.fixture
def given_library(whole_cache: Path, cache: Path, tmp_path: Path) -> Iterator[Path]:
    """The model's library in a folder of its own; the cache is empty and stays so."""
    (good,) = bundles(whole_cache)
    yield shutil.copytree(good, tmp_path / "library")
    assert not cache.exists()


def test_a_library_can_be_given(given_library: Path, model: Path) -> None:
    loaded = load_model(model, model_lib=given_library, config=CONFIG, progress=False)
    runner = loaded.open_runner()
    try:
        assert runner.logits([SequenceSlice([1, 2, 3], 0, [0], None)]).shape == (1, SMALLEST.vocab)
    finally:
        runner.close()


def test_a_library_that_cannot_be_linked_is_one_clear_error(given_library: Path, model: Path) -> None:
    loaded = load_model(model, model_lib=given_library, config=CONFIG, progress=False)
    (given_library / "model.o").write_bytes(b"nothing that can be linked")
    with pytest.raises(ModelFormatError, match=r"the model library .*library cannot be loaded: "):
        loaded.open_runner()


def test_another_model_s_library_is_refused(given_library: Path, tmp_path: Path) -> None:
    other = replace(SMALLEST, context=256).write(tmp_path / "other.gguf")
    with pytest.raises(ModelFormatError, match=r"library .*library was compiled for another model"):
        load_model(other, model_lib=given_library, config=CONFIG, progress=False)


def test_a_library_for_other_activations_is_refused(given_library: Path, model: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"activation_dtype float32, wanted int8"):
        load_model(model, model_lib=given_library, config=EngineConfig(activation_dtype="int8"), progress=False)


def test_a_library_for_another_processor_is_refused(foreign_library: Path, model: Path) -> None:
    with pytest.raises(DeviceUnavailableError, match=r"compiled for the ISA level .*; this processor can run: "):
        load_model(model, model_lib=foreign_library, config=CONFIG, progress=False)


def test_a_folder_that_is_no_library_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is no model library: it has no metadata.json. Leave model_lib out"):
        load_model(model, model_lib=tmp_path, config=CONFIG, progress=False)


def test_a_damaged_library_is_refused_not_rebuilt(given_library: Path, model: Path) -> None:
    hurt(given_library / "model.o", "flipped")
    with pytest.raises(ModelFormatError, match=r"damaged \(model.o\)"):
        load_model(model, model_lib=given_library, config=CONFIG, progress=False)
