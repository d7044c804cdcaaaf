"""The formats that an answer can be shown in, each as plain text and as Markdown."""

from __future__ import annotations

import json
import re
from typing import Literal, get_args

from mlc_nb.notebook.safe_markdown import fenced, safe_markdown

__all__ = ["FORMATS", "AnswerFormat", "answer_bundle"]

AnswerFormat = Literal["markdown", "text", "code", "json", "html"]
FORMATS: tuple[AnswerFormat, ...] = get_args(AnswerFormat)

_ONE_BLOCK = re.compile(r"\s*(?P<fence>`{3,}|~{3,})[^\n`]*\n(?:(?!(?P=fence)).)*(?:(?P=fence)\s*)?", re.DOTALL)


def answer_bundle(text: str, answer_format: AnswerFormat = "markdown") -> dict[str, str]:
    """Return the representations of an answer by MIME type.

    ``text/plain`` is the answer itself, character by character. No representation can run anything.

    Parameters
    ----------
    answer_format
        ``markdown`` as the front end renders it; ``text`` as it is; ``code`` in a block of code, unless it is one
        already; ``json`` laid out in lines, once it is whole; ``html`` as the source of a page.
    """
    bundle = {"text/plain": text}
    if answer_format == "markdown":
        bundle["text/markdown"] = safe_markdown(text)
    elif answer_format == "code":
        bundle["text/markdown"] = safe_markdown(text) if _ONE_BLOCK.fullmatch(text) else fenced(text)
    elif answer_format == "json":
        bundle["text/markdown"] = fenced(_laid_out(text), "json")
    elif answer_format == "html":
        bundle["text/markdown"] = fenced(text, "html")
    return bundle


def _laid_out(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text
