"""Batches, comparisons and difficult text in a real kernel with the real model."""

from __future__ import annotations

import html
import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.notebook.conftest import value_of

if TYPE_CHECKING:
    from tests.notebook.conftest import Kernel, Run, RunningCell

GREEDY = "--temperature 0 --max-tokens 12"


def table_of(run: Run) -> str:
    assert run.reply["status"] == "ok", run.errors
    (table,) = [data for data in run.displays.values() if "<table" in data.get("text/html", "")]
    return table["text/plain"]


def interrupt_after(kernel: Kernel, seconds: float, sees: str = "execute_input") -> RunningCell:
    done = False

    def interrupt(run: Run) -> None:
        nonlocal done
        if not done and run.of_type(sees):
            time.sleep(seconds)
            kernel.manager.interrupt_kernel()
            done = True

    return interrupt


def test_a_batch_of_lines(kernel: Kernel) -> None:
    run = kernel.run(f"%%mlc_batch {GREEDY} -o answers\nWhat is the capital of France?\n\n  Say hello.  \n")
    assert "2 requests" in table_of(run)
    assert value_of(kernel, "answers is _")
    assert value_of(kernel, "[item.request for item in answers]") == ["What is the capital of France?", "Say hello."]
    assert "Paris" in str(value_of(kernel, "answers.texts[0]"))
    assert kernel.run(f"%%mlc_batch {GREEDY} -o quiet;\nSay hello.").displays == {}
    assert value_of(kernel, "quiet.texts[0] == answers.texts[1]")


def test_a_batch_of_rows(kernel: Kernel) -> None:
    kernel.run(
        "import pandas\nframe = pandas.DataFrame({'word': ['cat', 'dog'], 'question': ['Say hello.', 'Say hello.']})"
    )
    table_of(kernel.run(f"%mlc_batch --data frame --column question --into said {GREEDY}"))
    assert value_of(kernel, "list(frame.said) == _.texts and frame.said[0] == frame.said[1]")
    run = kernel.run(
        f"%%mlc_batch --data frame {GREEDY} -o answers --system 'Be brief.'\nWhat is a {{word}}? {{{{word}}}}"
    )
    assert "2 requests" in table_of(run)
    assert value_of(kernel, "[item.request for item in answers]") == [
        "What is a cat? {{word}}",
        "What is a dog? {{word}}",
    ]
    kernel.run("schema = {'enum': ['yes', 'no']}; words = ['Is fire hot?', 'Is ice hot?']")
    kernel.run("%mlc_batch --data words --json-schema schema --temperature 0 -o answers")
    assert set(value_of(kernel, "answers.texts")) <= {'"yes"', '"no"'}  # type: ignore[call-overload]
    assert kernel.run("%mlc_batch --data words --into x").reply["status"] == "error"


def test_an_interrupted_batch_keeps_what_it_has(kernel: Kernel) -> None:
    kernel.run("%mlc_load")
    prompts = "\n".join(f"Tell me a story about {number}." for number in range(60))
    run = kernel.run(f"%%mlc_batch --max-tokens 60 -o part\n{prompts}", during=interrupt_after(kernel, 3))
    (error,) = run.errors
    assert re.fullmatch(r"the batch was stopped after \d+ of 60 answers", error["evalue"])
    assert len(error["traceback"]) == 1
    assert 0 < value_of(kernel, "len([text for text in part.texts if text])") < 60
    assert value_of(kernel, "len(part)") == 60
    assert value_of(kernel, "{type(item.error).__name__ for item in part.errors} == {'RequestAborted'}")
    assert "Paris" in table_of(kernel.run(f"%%mlc_batch {GREEDY}\nWhat is the capital of France?"))


def test_a_comparison_streams_side_by_side(kernel: Kernel) -> None:
    run = kernel.run(
        "%%mlc_compare --temperature 0 --temperature 1.3 --seed 3 --max-tokens 60 -o both\nTell me a tale."
    )
    (bundle,) = run.displays.values()
    texts = value_of(kernel, "[answer.text for answer in both.answers]")
    cells = [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", bundle["text/html"], re.DOTALL)]
    assert cells[:2] == texts
    assert value_of(kernel, "both.labels") == ["smollm2 · temperature 0.0", "smollm2 · temperature 1.3"]
    states = [content["data"]["text/plain"] for content in run.of_type("display_data", "update_display_data")]
    assert len([state for state in states if "…" in state]) >= 2, "the answers came in lumps"
    single = kernel.run("%%mlc_chat --no-history --temperature 0 --max-tokens 60\nTell me a tale.")
    assert texts[0] == single.text  # type: ignore[index]
    assert value_of(kernel, "both is _ or both is __")


def test_a_comparison_with_one_that_fails_shows_the_others(kernel: Kernel) -> None:
    run = kernel.run("%%mlc_compare --temperature 0 --temperature -1 --max-tokens 5\nSay hello.")
    assert run.errors[0]["ename"] == "BadRequestError"
    assert "Hello" in str(run.displays)
    run = kernel.run("%%mlc_compare -m smollm2 -m nowhere\nSay hello.")
    assert run.errors[0]["ename"] == "ModelNotFoundError"


def test_an_interrupted_comparison_keeps_what_it_has(kernel: Kernel) -> None:
    run = kernel.run(
        "%%mlc_compare --seed 1 --seed 2 --max-tokens 1500 -o both\nTell me a long story.",
        during=interrupt_after(kernel, 0.1, "update_display_data"),
    )
    assert run.errors[0]["traceback"] == ["KeyboardInterrupt: the answers were stopped"]
    assert value_of(kernel, "[answer.interrupted for answer in both.answers]") == [True, True]
    assert value_of(kernel, "__import__('mlc_nb').engines()[0].requests_running") == 0


# The model is held to a text, so that it is known what must be seen.
SAY = """
import re
from mlc_nb.notebook.chat_cell import Presentation, Question
def say(text, **presentation):
    chats = get_ipython().magics_manager.registry["ChatMagics"]._state.chats
    pattern = re.sub(r"[^\\w\\s]|_", lambda mark: f"\\\\x{{{ord(mark[0]):x}}}", text)
    fields = {"response_format": {"type": "regex", "regex": pattern}, "temperature": 0}
    chats.ask(Question("Go.", chat="said", begins=True, fields=fields), Presentation(**presentation))
"""
DIFFICULT = {
    "emoji": "👩🏽‍🚀 family: 👨‍👩‍👧‍👦 flag: 🇫🇷 end",
    "cjk": "漢字とかな、한국어。",
    "rtl": "שלום עולם مرحبا‏ ١٢٣",
    "fence": "Look:\n```python\nprint('<b>')",
    "html": "<script>document.title='owned'</script><img src=x onerror=alert(1)> & <b>bold</b>",
    "markdown": "| a | b |\n| - | - |\n| `x<y>` | $a<b$ |",
    "code": "```html\n<b>bold</b>\n```\nafter",
    "accents": "e\u0301 n\u0303 Å ﷽ \u200d",
}


@pytest.mark.parametrize("text", DIFFICULT.values(), ids=list(DIFFICULT))
def test_the_text_is_the_same_everywhere(kernel: Kernel, text: str) -> None:
    assert kernel.run(SAY).reply["status"] == "ok"
    run = kernel.run(f"say({text!r}, output='reply')")
    assert run.reply["status"] == "ok", run.errors
    assert run.text == text
    for content in run.of_type("display_data", "update_display_data"):
        state = content["data"]
        assert "\ufffd" not in str(state)
        if "text/html" not in state:
            assert text.startswith(state["text/plain"]), "text was taken back"
        assert not re.search(r"<(?!/?(?:pre|code)>)[a-z/!]", state.get("text/markdown", ""), re.IGNORECASE)
    kernel.run("%mlc_history said -o messages")
    assert value_of(kernel, "reply.text") == text
    assert value_of(kernel, "str(_) == reply.text == messages[-1]['content']")
    raw = kernel.run(f"say({text!r}, raw=True)")
    assert raw.stream("stdout") == text


def test_a_text_that_ends_within_a_character_ends_before_it(kernel: Kernel) -> None:
    kernel.run(SAY)
    kernel.run("import functools; short = functools.partial(say)")
    for limit in (1, 2, 3, 4, 5):
        run = kernel.run(
            SAY.replace('"temperature": 0}', f'"temperature": 0, "max_tokens": {limit}}}')
            + "\nsay('👩🏽‍🚀👨‍👩‍👧‍👦🇫🇷', output='r')"
        )
        assert run.reply["status"] == "ok", run.errors
        assert "\ufffd" not in str(run.messages)
        assert "👩🏽‍🚀👨‍👩‍👧‍👦🇫🇷".startswith(run.text)
        assert value_of(kernel, "r.text") == run.text
