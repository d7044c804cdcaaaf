"""Markdown of a model: reads as it was meant, and holds no HTML of its own whatever the model wrote."""

from __future__ import annotations

import html
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlc_nb.notebook.answer_format import FORMATS, answer_bundle
from mlc_nb.notebook.safe_markdown import fenced, safe_markdown

OURS = ("<pre><code>", "</code></pre>", "<code>", "</code>")
PIECES = st.sampled_from(
    [
        "<",
        "script>",
        "</",
        "b",
        "`",
        "``",
        "```",
        "~~~",
        "$",
        "$$",
        "\\",
        "\\(",
        "\\)",
        "&",
        "#",
        "&#106;",
        "&colon;",
        "javascript:",
        "JavaScript:",
        "[x](",
        "[x]:",
        ")",
        "<!--",
        "<?",
        "a",
        "-",
        ">",
        " ",
        "\n",
        "\n\n",
        "```html\n",
        "  ",
        "\t",
    ]
)
HOSTILE = st.lists(PIECES, max_size=30).map("".join)


def without_ours(markdown: str) -> str:
    for tag in OURS:
        markdown = markdown.replace(tag, "·")
    return markdown


@given(HOSTILE)
def test_no_tag_and_no_script_gets_out(text: str) -> None:
    safe = without_ours(safe_markdown(text))
    assert not re.search(r"<[A-Za-z/!?]", safe)
    assert not re.search(r"(?:java|vb)script:", safe, re.IGNORECASE)
    for place in re.findall(r"\](?:\(|:)\s*([^)\n]*)", safe):
        assert not re.search(r"(?:java|vb)script:", html.unescape(place), re.IGNORECASE)


@given(HOSTILE)
def test_every_format_of_every_text_is_safe_and_keeps_the_text(text: str) -> None:
    for answer_format in FORMATS:
        bundle = answer_bundle(text, answer_format)
        assert bundle["text/plain"] == text
        assert "text/html" not in bundle
        assert not re.search(r"<[A-Za-z/!?]", without_ours(bundle.get("text/markdown", "")))


@pytest.mark.parametrize(
    "text",
    [
        "plain *emphasis* and `code` with 1 < 2",
        "```python\nif a < b and c > d:\n    pass\n```",
        "| a | b |\n| --- | --- |\n| 1 | 2 |",
        "$a < b$ and $$\\frac{1}{2}$$",
        "😀 漢字 עברית",
        "R&D, AT&T and a & b",
    ],
)
def test_most_text_stays_byte_for_byte(text: str) -> None:
    assert safe_markdown(text) == text


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a <b>bold</b>", "a &lt;b>bold&lt;/b>"),
        ("`List<String>`", "<code>List&#60;String&#62;</code>"),
        ("$a<b$", "$a< b$"),
        ("```html\n<b>\n```\n<i>", "<pre><code>&#60;b&#62;</code></pre>\n&lt;i>"),
        ("```html\n<b", "<pre><code>&#60;b</code></pre>"),
        ("```html\n", "```html\n"),
        ("[x](javascript:alert(1))", "[x](javascript\u200b:alert(1))"),
        ("&#106;avascript:", "&amp;#106;avascript:"),
        ("\\<b>", "&lt;b>"),
    ],
)
def test_what_html_becomes(text: str, markdown: str) -> None:
    assert safe_markdown(text) == markdown


def test_code_that_is_shown_as_code_is_the_code() -> None:
    code = "#include <vector>\n\nstd::vector<int> x; // a * b _ c [d](e)\n"
    shown = safe_markdown(f"```c++\n{code}```")
    assert html.unescape(shown.removeprefix("<pre><code>").removesuffix("</code></pre>")) == code.removesuffix("\n")


def test_a_fence_is_longer_than_the_fences_inside() -> None:
    assert fenced("a\n````\nb").startswith("`````\n")


def test_the_formats() -> None:
    assert answer_bundle("x", "text") == {"text/plain": "x"}
    assert answer_bundle("x = 1", "code")["text/markdown"] == "```\nx = 1\n```"
    block = "```python\nx = 1\n```"
    assert answer_bundle(block, "code")["text/markdown"] == block
    assert answer_bundle('{"a":[1]}', "json")["text/markdown"] == '```json\n{\n  "a": [\n    1\n  ]\n}\n```'
    assert answer_bundle('{"a":[1', "json")["text/markdown"] == '```json\n{"a":[1\n```'


def test_the_work_grows_with_the_text_alone() -> None:
    for piece in ("`a ``b ", "$$ <b ", "\\( <b ", "``` \n<b", "<b "):
        started = time.perf_counter()
        safe_markdown("<b>" + piece * 4000)
        assert time.perf_counter() - started < 2
