"""The options of ``%%mlc_chat`` and the other magics, in a real kernel with the real model."""

from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.templates import HERMES_TEMPLATE
from tests.notebook.conftest import value_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.notebook.conftest import Kernel, Run

GREEDY = "--temperature 0 --max-tokens 20"


def shown(run: Run) -> dict[str, str]:
    """The only output of a cell."""
    assert run.reply["status"] == "ok", run.errors
    (bundle,) = run.displays.values()
    return bundle


def test_conversations_have_names(kernel: Kernel) -> None:
    kernel.run("%mlc_reset --all")
    kernel.run(f"%%mlc_chat --name a {GREEDY} --system Brief\nMy name is Ann.")
    kernel.run(f"%%mlc_chat --name 'b 😀' {GREEDY}\nMy name is Bea.")
    kernel.run(f"%%mlc_chat {GREEDY}\nHello")
    kernel.run(f"%%mlc_chat --name a {GREEDY}\nWho am I?")
    kernel.run(f"%%mlc_chat --name a --no-history {GREEDY} --system Other\nAlone")
    table = shown(kernel.run("%mlc_chats"))
    assert [line.split("  ")[0] for line in table["text/plain"].splitlines()[2:]] == ["a", "b 😀", "smollm2"]
    history = json.loads(shown(kernel.run("%mlc_history a --export openai"))["text/plain"])["messages"]
    assert [message["role"] for message in history] == ["system", "user", "assistant", "user", "assistant"]
    assert (history[0]["content"], history[3]["content"]) == ("Brief", "Who am I?")
    kernel.run(f"%%mlc_chat --name a --new {GREEDY}\nAnew")
    kernel.run("%mlc_history a -o messages")
    assert value_of(kernel, "messages[0]['content']") == "Anew"
    kernel.run("%mlc_reset a")
    assert "There is no conversation 'a'" in kernel.run("%mlc_history a").errors[0]["evalue"]
    assert "'a', 'b" not in shown(kernel.run("%mlc_chats"))["text/plain"]
    kernel.run("%%mlc_chat --name 'b 😀' -m nowhere\nHi")
    assert kernel.run(f"%%mlc_chat --name 'b 😀' {GREEDY}\nStill there?").reply["status"] == "ok"


def test_history_is_exported(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%mlc_reset --all")
    assert "empty" in shown(kernel.run("%mlc_history"))["text/plain"]
    kernel.run("%%mlc_chat -m nowhere --name none\nHi")
    assert "no conversation yet" in shown(kernel.run("%mlc_chats"))["text/plain"]
    run = kernel.run(f"%%mlc_chat --system Brief {GREEDY}\nWhat is the capital of France?")
    seen = shown(kernel.run("%mlc_history"))["text/plain"]
    for text in ("**System**\n\nBrief", "**You**\n\nWhat is the capital of France?", f"**Assistant**\n\n{run.answer}"):
        assert text in seen
    path = tmp_path / "chat.json"
    assert kernel.run(f"%mlc_history --export json --file {path}").stream("stdout") == f"wrote {path}\n"
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert (saved["name"], saved["model"]) == ("smollm2", "smollm2")
    assert saved["messages"][-1] == {"role": "assistant", "content": run.answer}
    assert kernel.run("%mlc_history --file x").reply["status"] == "error"
    assert "cannot be written" in kernel.run("%mlc_history --export md --file /no/such/x").errors[0]["evalue"]


def test_a_schema_holds_the_answer(kernel: Kernel) -> None:
    kernel.run(
        "from pydantic import BaseModel, Field\n"
        "class City(BaseModel):\n    city: str = Field(max_length=20)\n    inhabitants: int"
    )
    run = kernel.run("%%mlc_chat --new --json-schema City --temperature 0 -o found\nThe capital of France?")
    assert run.reply["status"] == "ok", run.errors
    assert value_of(kernel, "City.model_validate_json(found.text).city") == "Paris"
    assert run.answer.startswith("```json\n{\n")
    assert run.text == value_of(kernel, "found.text")
    run = kernel.run("%%mlc_chat --no-history --format json --temperature 0 --max-tokens 40\nA person as JSON")
    assert run.text.startswith("{")
    assert run.answer.startswith("```json\n{")


@pytest.mark.parametrize(
    ("answer_format", "markdown"),
    [("text", None), ("html", r"```html\n.*\n```"), ("code", r"```\n.*\n```"), ("markdown", r"[^`].*")],
)
def test_formats(kernel: Kernel, answer_format: str, markdown: str | None) -> None:
    run = kernel.run(f"%%mlc_chat --no-history {GREEDY} --format {answer_format} -o reply\nSay hello.")
    assert "Hello" in run.text
    bundle = kernel.run("reply").of_type("execute_result")[0]["data"]
    assert bundle["text/plain"] == run.text
    assert set(bundle) == {"text/plain"} | ({"text/markdown"} if markdown else set())
    assert markdown is None or re.fullmatch(markdown, bundle["text/markdown"], re.DOTALL)


def test_raw_and_silent(kernel: Kernel) -> None:
    run = kernel.run(f"%%mlc_chat --no-history --raw {GREEDY} -o reply\nSay hello.")
    assert run.displays == {}
    assert run.stream("stdout") == value_of(kernel, "reply.text")
    for line in (f"%%mlc_chat --no-history {GREEDY} -o quiet;", f"%%mlc_chat --no-history {GREEDY} -o quiet ;"):
        run = kernel.run(f"{line}\nSay hello.")
        assert (run.reply["status"], run.displays, run.stream("stdout")) == ("ok", {}, "")
        assert value_of(kernel, "quiet is _ and quiet.text == reply.text")
    assert kernel.run("%%mlc_chat --raw --format text\nx").reply["status"] == "error"


def test_interpolation_is_asked_for(kernel: Kernel) -> None:
    kernel.run("who, n = 'Ann', 3")
    cells = {
        "": ("{who} {n}", ""),
        "-i": ("Ann 3 {missing} {{who}}", "{missing} stay as they are"),
        "--var who": ("Ann {n}", ""),
    }
    for options, (prompt, said) in cells.items():
        body = "{who} {n}" + (" {missing} {{who}}" if options == "-i" else "")
        run = kernel.run(f"%%mlc_chat --new {options} --temperature 0 --max-tokens 1\n{body}")
        assert run.reply["status"] == "ok", run.errors
        assert said in run.stream("stderr")
        assert len(run.stream("stderr").splitlines()) == (1 if said else 0)
        kernel.run("%mlc_history -o messages")
        assert value_of(kernel, "messages[0]['content']") == prompt


TOOLS = f"""
import dataclasses, mlc_nb
from mlc_nb.protocol.chat_template import ChatTemplate
def population(city: str) -> int:
    "How many people live there."
    asked.append(city)
    return 2102650
described = [{{"type": "function", "function": {{"name": "search", "parameters": {{"type": "object",
    "properties": {{"query": {{"type": "string", "maxLength": 10}}}}, "required": ["query"]}}}}}}]
asked = []
core = mlc_nb.get_engine().core
plain = core._model
core._model = dataclasses.replace(plain, chat_template=ChatTemplate({HERMES_TEMPLATE!r}, bos_token="", eos_token=""))
"""


def test_functions_are_run_and_described_tools_are_shown(kernel: Kernel) -> None:
    kernel.run("%mlc_load")
    assert kernel.run(TOOLS).reply["status"] == "ok"
    run = kernel.run(
        "%%mlc_chat --new --tools population --tool-choice required --temperature 0 --max-tokens 60 -o reply\n"
        "How many people live in Paris?"
    )
    assert run.reply["status"] == "ok", run.errors
    calls = value_of(kernel, "len(asked)")
    assert calls
    assert calls == len([note for note in run.notes if re.fullmatch(r"population\(\{.*\) → 2102650", note)])
    kernel.run("%mlc_history -o messages")
    roles = value_of(kernel, "[message['role'] for message in messages]")
    assert (roles[:3], roles[-1]) == (["user", "assistant", "tool"], "assistant")
    assert roles.count("tool") == calls
    assert value_of(kernel, "messages[-1]['content'] == reply.text")
    assert kernel.run("%%mlc_chat --max-tokens 2\nThanks").reply["status"] == "ok"
    run = kernel.run(
        "%%mlc_chat --new --tools described --tool-choice search --temperature 0 --max-tokens 80 -o reply\nFind it."
    )
    assert run.reply["status"] == "ok", run.errors
    assert [note for note in run.notes if note.startswith("search({") and note.endswith("(not run)")]
    assert value_of(kernel, "reply.choices[0].finish_reason") == "tool_calls"
    kernel.run("core._model = plain")
    (error,) = kernel.run("%%mlc_chat --tools population\nx").errors
    assert "does not write tools at all" in error["evalue"]


def test_raw_completions(kernel: Kernel) -> None:
    line = kernel.run("%mlc_complete --temperature 0 --max-tokens 8 It's a   long way")
    kernel.run("%%mlc_complete --temperature 0 --max-tokens 8 -o text\nIt's a   long way")
    assert line.text == value_of(kernel, "text.text")
    assert value_of(kernel, "text is _")
    echoed = kernel.run("%mlc_complete --echo --temperature 0 --max-tokens 8 It's a   long way")
    assert echoed.text == f"It's a   long way{line.text}"
    assert "the line has no prompt" in kernel.run("%mlc_complete --echo").stream("stderr")
    assert "the cell has no prompt" in kernel.run("%%mlc_complete --echo\n ").stream("stderr")


def test_logprobs_are_shown(kernel: Kernel) -> None:
    run = kernel.run(f"%%mlc_chat --no-history --logprobs 3 {GREEDY} -o reply\nSay hello <b>.")
    bundle = shown(kernel.run("reply.show_logprobs()"))
    assert "hover for the alternatives" in bundle["text/html"]
    tokens = re.findall(r'<span style="[^"]*" title="[^"]*">([^<]*)</span>', bundle["text/html"])
    assert html.unescape("".join(tokens)) == run.text
    assert re.match(r"\S+ +\d+\.\d% +\S+ \d+\.\d%", bundle["text/plain"].splitlines()[1])
    kernel.run("%mlc_complete --echo --logprobs 2 --max-tokens 3 -o text Once upon a")
    assert "upon" in shown(kernel.run("import mlc_nb; mlc_nb.show_logprobs(text)"))["text/plain"]
    kernel.run("%%mlc_chat --no-history --max-tokens 1 -o reply\nHi")
    (error,) = kernel.run("reply.show_logprobs()").errors
    assert "ask for them with `--logprobs 5`" in error["evalue"]


def test_settings(kernel: Kernel) -> None:
    table = shown(kernel.run("%mlc_config"))["text/plain"]
    assert "temperature    None" in table
    assert kernel.run("%mlc_config temperature 0").stream("stdout") == "temperature = 0.0\n"
    assert kernel.run("%mlc_config max_tokens 3").stream("stdout") == "max_tokens = 3\n"
    assert kernel.run("%mlc_config system You are a pirate.").stream("stdout") == "system = 'You are a pirate.'\n"
    kernel.run("%%mlc_chat --new -o reply\nHello")
    assert value_of(kernel, "reply.usage.completion_tokens") == 3
    kernel.run("%mlc_history -o messages")
    assert value_of(kernel, "messages[0]['content']") == "You are a pirate."
    assert "MLCMagics.temperature=<Float>" in kernel.run("%config MLCMagics").stream("stdout")
    kernel.run("%config MLCMagics.max_tokens = 5")
    kernel.run("%%mlc_chat -o reply\nHello")
    assert value_of(kernel, "reply.usage.completion_tokens") == 5
    assert kernel.run('%mlc_config engine_config {"max_num_sequence": 2}').stream("stdout") == (
        "engine_config = {'max_num_sequence': 2}\n"
    )
    assert kernel.run("%mlc_config engine_config {}").stream("stdout") == "engine_config = {}\n"
    for line, said in (
        ("%mlc_config colour red", "there is no setting 'colour'"),
        ("%mlc_config temperature warm", "temperature"),
        ("%mlc_config temperature -1", "temperature"),
        ("%mlc_config format pdf", "format"),
    ):
        run = kernel.run(line)
        assert run.reply["status"] == "error"
        assert said in run.stream("stderr")
        assert len(run.stream("stderr").strip().splitlines()) == 1
    for name in ("temperature", "max_tokens", "system"):
        assert kernel.run(f"%mlc_config {name} None").stream("stdout") == f"{name} = None\n"


def test_models_and_doctor(kernel: Kernel) -> None:
    kernel.run("%mlc_load")
    table = shown(kernel.run("%mlc_models"))["text/plain"]
    assert re.search(r"smollm2 +ready +98\.4 MB +PYPI://", table)
    kernel.run("%mlc_unload --all")
    assert re.search(r"smollm2 +cached", shown(kernel.run("%mlc_models"))["text/plain"])
    report = kernel.run("%mlc_doctor").stream("stdout")
    assert "Models can run here." in report


def test_every_magic_is_found_and_explained(kernel: Kernel) -> None:
    names = value_of(
        kernel,
        "sorted({(kind, name) for kind, found in get_ipython().magics_manager.magics.items() "
        "for name in found if name.startswith('mlc')})",
    )
    overview = kernel.run("%mlc").stream("stdout")
    (page,) = kernel.run("%mlc?").reply["payload"]
    for kind, name in names:  # type: ignore[misc]
        magic = f"{'%%' if kind == 'cell' else '%'}{name}"
        assert magic in overview
        assert magic in page["data"]["text/plain"]
        (shown_help,) = kernel.run(f"{magic}?").reply["payload"]
        text = shown_help["data"]["text/plain"]
        assert name == "mlc" or "Examples::" in text
        if name != "mlc":
            assert kernel.run(f"{magic} --help").stream("stdout").startswith("::")


def complete(kernel: Kernel, code: str, cursor: int | None = None) -> list[str]:
    request = kernel.client.complete(code, cursor if cursor is not None else len(code))
    while True:
        reply: dict[str, Any] = kernel.client.get_shell_msg(timeout=20)
        if reply["parent_header"].get("msg_id") == request:
            matches: list[str] = reply["content"]["matches"]
            return matches


def test_tab_completes(kernel: Kernel) -> None:
    kernel.run("%mlc_reset --all")
    kernel.run("frame, schema = [1], {}")
    kernel.run("%%mlc_chat --name trip --max-tokens 1\nHi")
    assert complete(kernel, "%%mlc_chat --te") == ["--temperature"]
    assert complete(kernel, "%%mlc_chat --te\nprompt", len("%%mlc_chat --te")) == ["--temperature"]
    assert complete(kernel, "%%mlc_chat -m ") == ["smollm2"]
    assert complete(kernel, "%%mlc_chat --model=smo") == ["smollm2"]
    assert complete(kernel, "%%mlc_chat --name t") == ["trip"]
    assert complete(kernel, "%mlc_history t") == ["trip"]
    assert complete(kernel, "%%mlc_chat --json-schema sch") == ["schema"]
    assert complete(kernel, "%%mlc_batch --data fra") == ["frame"]
    assert complete(kernel, "%%mlc_chat --format h") == ["html"]
    assert complete(kernel, "%mlc_config tem") == ["temperature"]
    assert "--all" in complete(kernel, "%mlc_unload ")
    assert "--temperature" not in complete(kernel, "%%mlc_chat\n--te")
    assert "frame" in complete(kernel, "fra")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%mlc_chat --image cat.png\nWhat is it?", "argument --image: 'cat.png' cannot be sent"),
        ("%%mlc_chat --format pdf\nx", "argument --format: invalid choice: 'pdf'"),
        ("%%mlc_chat --var nothing\nx", "--var nothing: there is no variable 'nothing'"),
        ("%%mlc_chat --temperature\nx", "argument --temperature: expected one argument"),
        ("%%mlc_batch\n  \n", "there is no prompt"),
        ("%%mlc_batch --data nothing\n{a}", "there is no such variable"),
        ("%%mlc_batch --column a\nx", "--column and --into need --data"),
        ("%%mlc_compare\nx", "nothing differs"),
        (
            "%%mlc_compare --seed 1 --seed 2 --top-p 1 --top-p 1 --top-p 1\nx",
            "is given 2 times; give it once or 3 times",
        ),
        ("%%mlc_compare --seed 1 --seed 2\n", "the cell has no prompt"),
        ("%mlc_reset a --all", "not both"),
        ("%mlc_history --export pdf", "invalid choice: 'pdf'"),
        ("%%mlc_chat --name ' '\nx", "argument --name: is empty"),
        ("%%mlc_chat -m ''\nx", "argument -m/--model: is empty"),
        ("%mlc_models extra", "unrecognized arguments: extra"),
    ],
)
def test_a_wrong_option_is_one_line(kernel: Kernel, cell: str, said: str) -> None:
    run = kernel.run(cell)
    assert run.reply["status"] == "error"
    assert said in run.stream("stderr")
    assert len(run.stream("stderr").strip().splitlines()) == 1
