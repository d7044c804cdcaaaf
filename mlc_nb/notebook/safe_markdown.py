"""Markdown of a model, made harmless: HTML in it shows as text, and no link can run a script.

Front ends render Markdown with several parsers, and JupyterLab runs what a trusted Markdown output holds of HTML. No
guess at what a parser will take for code can be trusted with that. So no ``<`` that could open a tag leaves this
module, wherever it stands; telling code, math and prose apart only decides how it is written so that it reads well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["fenced", "safe_markdown"]

_TAG = r"<(?=[A-Za-z/!?])"
_SCRIPT = r"(?:java|vb)script:"
# A parser decodes these within a link, where they could spell a script's address.
_ENTITY = r"&(?=(?:#[0-9]+|#[xX][0-9a-fA-F]+|colon|Tab|NewLine);)"
_DANGER = re.compile(f"{_TAG}|{_SCRIPT}|{_ENTITY}", re.IGNORECASE)
_IN_PROSE = re.compile(rf"\\?(?P<tag>{_TAG})|(?P<script>{_SCRIPT})|(?P<entity>{_ENTITY})", re.IGNORECASE)
_FENCE = re.compile(r"(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})")
# Bounded, so that the work stays linear in the text whatever its marks are.
_CODE_OR_MATH = re.compile(
    r"(?P<ticks>(?<!`)`+(?!`))(?P<code>(?:(?!\n[ \t]*\n).){1,2000}?)(?<!`)(?P=ticks)(?!`)"
    r"|(?P<math>\$\$.{1,2000}?\$\$|\$[^$\n]+\$|\\\[.{1,2000}?\\\]|\\\(.{1,2000}?\\\))",
    re.DOTALL,
)


def safe_markdown(text: str) -> str:
    """Return Markdown that shows ``text`` and holds no HTML of its own; most text comes back as it is."""
    if not _DANGER.search(text):
        return text
    return "".join(_safe_code(part) if is_code else _safe_prose(part) for is_code, part in _parts(text))


def fenced(text: str, language: str = "") -> str:
    """Return Markdown that shows ``text`` as a block of code."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    end = "" if text.endswith("\n") else "\n"
    return safe_markdown(f"{fence}{language}\n{text}{end}{fence}")


def _parts(text: str) -> Iterator[tuple[bool, list[str]]]:
    """Split into runs of lines: prose, and fenced blocks with their fences; an open block goes on to the end."""
    run: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        if fence:
            run.append(line)
            mark = line.strip()
            if len(mark) >= len(fence) and not mark.strip(fence[0]):
                yield True, run
                run, fence = [], ""
            continue
        opening = _FENCE.match(line)
        if opening is not None:
            yield False, run
            run, fence = [], opening["fence"]
        run.append(line)
    yield bool(fence), run


def _safe_code(lines: list[str]) -> str:
    block = "".join(lines)
    if not _DANGER.search(block):
        return block
    opening = _FENCE.match(lines[0])
    assert opening is not None  # it is why these lines are code
    is_closed = len(lines) > 1 and not lines[-1].strip().strip(opening["fence"][0])
    body = "".join(lines[1:-1] if is_closed else lines[1:])
    # The front end's own highlighting is lost, which beats an answer that could run.
    end = "\n" if lines[-1].endswith("\n") else ""
    return f"{opening['indent']}<pre><code>{_as_entities(body.removesuffix(chr(10)).lstrip(' '))}</code></pre>{end}"


def _safe_prose(lines: list[str]) -> str:
    prose, done, safe = "".join(lines), 0, []
    for found in _CODE_OR_MATH.finditer(prose):
        safe.append(_IN_PROSE.sub(_as_text, prose[done : found.start()]))
        done = found.end()
        if not _DANGER.search(found[0]):
            safe.append(found[0])
        elif found["math"] is not None:
            # Within formulas space has no meaning, and an entity would not be read.
            safe.append(_IN_PROSE.sub(lambda danger: _as_text(danger) if danger["tag"] is None else "< ", found[0]))
        else:
            safe.append(f"<code>{_as_entities(found['code'].strip(' '))}</code>")
    safe.append(_IN_PROSE.sub(_as_text, prose[done:]))
    return "".join(safe)


def _as_text(danger: re.Match[str]) -> str:
    if danger["tag"] is not None:
        return "&lt;"
    if danger["entity"] is not None:
        return "&amp;"
    # A zero-width space: the address is none of a script then, and the text looks the same.
    return danger[0][:-1] + "\u200b:"


def _as_entities(text: str) -> str:
    """Write every ASCII mark as a number: no parser takes it for anything but the character."""
    return re.sub(r"[!-/:-@\[-`{-~]", lambda mark: f"&#{ord(mark[0])};", text)
