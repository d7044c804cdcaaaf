"""The magics in a plain IPython terminal, where answers stream as text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SESSION = r"""
%load_ext mlc_nb
%%mlc_chat --temperature 0 --max-tokens 40 -o answer
What is the capital of France? Answer in one sentence.


print("named", answer is _, type(answer).__name__)
%%mlc_chat -m nowhere
Hi


%mlc_complete --temperature 0 --max-tokens 8 --echo Once upon a
%%mlc_batch --temperature 0 --max-tokens 8 -o answers
Name a colour.
Say hello.


%%mlc_compare --temperature 0 --temperature 1 --max-tokens 8
Name a colour.


%mlc_chats
from mlc_nb.notebook.stream_view import open_view
open_view(get_ipython()).add("a\x1b]0;owned\x07\x1b[2J\r\x9b b\tc\n")
%mlc_status
%mlc_unload
"""


def test_a_session(warm_model: Path, tmp_path: Path) -> None:
    del warm_model
    finished = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor", "--no-confirm-exit"],
        input=SESSION.lstrip(),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    output = finished.stdout
    assert output.count("The capital of France is Paris.") == 1
    assert "tokens/s" in output
    assert "named True ChatAnswer" in output
    assert "ModelNotFoundError: There is no model 'nowhere'" in output
    assert "Traceback" not in output
    assert re.search(r"smollm2 +Q4_1 +cpu +ready", output)
    assert "unloaded smollm2" in output
    assert "Once upon a time" in output
    assert "2 requests" in output
    assert "--- smollm2 · temperature 1.0 ---" in output
    assert re.search(r"smollm2 +smollm2 +1 +- +What is the capital of France\?", output)
    assert "a␛]0;owned␇␛[2J␍␦ b\tc\n" in output, "a model can command the terminal"
