"""What README.md and docs/ promise: the example runs as it is printed, and no link is dead."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def test_the_python_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, check=False, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    assert "Paris" in finished.stdout
    assert finished.stdout.rstrip().endswith("token/s")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not dead
