"""``%%mlc_chat`` in a real kernel with the real model."""

from __future__ import annotations

import re
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.notebook.conftest import value_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.notebook.conftest import Kernel, Run

LONG = "%%mlc_chat --new --temperature 0.7 --seed 1 --max-tokens 1500\nTell me a long story about a lighthouse keeper."


def test_an_answer_streams_into_one_output(kernel: Kernel) -> None:
    run = kernel.run(
        "%%mlc_chat --new --temperature 0 --max-tokens 200\n"
        "Name the capital of France and tell me two things it is famous for."
    )
    assert run.reply["status"] == "ok", run.errors
    assert "Paris" in run.answer
    assert "\ufffd" not in run.answer
    assert "tokens/s" in run.note
    assert "first token after" in run.note
    assert run.stream("stderr") == ""
    times = run.answer_times
    assert len(times) >= 4, "the answer came in lumps"
    assert all(later - earlier > 0.045 for earlier, later in zip(times[:-1], times[2:], strict=False)), (
        "over 20 a second"
    )
    for _, message in run.messages:
        shown = message["content"].get("data", {}).get("text/markdown", "")
        assert run.answer.startswith(shown), "text was taken back"
        assert "\ufffd" not in shown


def test_the_response_is_in_underscore_out_and_the_named_variable(kernel: Kernel) -> None:
    run = kernel.run("%%mlc_chat --new --temperature 0 --max-tokens 20 -o reply\nWhat is the capital of Italy?")
    number = run.reply["execution_count"]
    assert not run.of_type("execute_result"), "the answer was shown twice"
    assert value_of(kernel, f"[_ is reply, Out[{number}] is reply, reply.text]") == [True, True, run.answer]
    shown = kernel.run("reply").of_type("execute_result")[0]["data"]
    assert shown == {"text/plain": run.answer, "text/markdown": run.answer}
    assert value_of(kernel, "reply.choices[0].message.content == str(reply) == reply.text")
    assert value_of(kernel, "reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens")


RECORD = """
from mlc_nb.engine import prepare
if "seen" not in globals():
    seen, original = [], prepare.prepare_chat
    def prepare_chat(model, request, *rest, **named):
        seen.append([(message.role, message.content) for message in request.messages])
        return original(model, request, *rest, **named)
    prepare.prepare_chat = prepare_chat
"""


def test_the_conversation_goes_on_and_can_be_reset(kernel: Kernel) -> None:
    kernel.run(RECORD)
    first = kernel.run(
        "%%mlc_chat --new --temperature 0 --max-tokens 20\nWhat is the capital of France? Answer in one sentence."
    )
    run = kernel.run("%%mlc_chat --temperature 0 --max-tokens 60\nName three sights there.")
    assert value_of(kernel, "seen[-1]") == [
        ["user", "What is the capital of France? Answer in one sentence."],
        ["assistant", first.answer],
        ["user", "Name three sights there."],
    ]
    assert "Louvre" in run.answer
    kernel.run("%mlc_reset")
    kernel.run("%%mlc_chat --temperature 0 --max-tokens 1\nWhat did I ask?")
    assert value_of(kernel, "seen[-1]") == [["user", "What did I ask?"]]


@pytest.mark.parametrize(
    "prompt",
    [
        "plain",
        "  leading and trailing space  ",
        "\nblank lines around\n\n",
        "{json} {{braces}} {1+1} $HOME ${x} $name $$",
        r"back\slashes \n \t C:\new \\ and 'quotes' \"too\"",
        ">>> print(1)\n1\n>>> x\n... y",
        "In [1]: print(1)\nOut[1]: 2",
        "!ls\n%timeit x\n?help\nx?\n%%bash\nline;",
        "tabs\tand\u00a0unicode 😀 Ünï 漢字 עברית\u2028separator",
        "an 'open quote and a (parenthesis",
    ],
)
def test_the_prompt_arrives_byte_for_byte(kernel: Kernel, prompt: str) -> None:
    kernel.run(RECORD)
    kernel.run("name = x = 'expanded'")
    run = kernel.run(f"%%mlc_chat --new --temperature 0 --max-tokens 1\n{prompt}")
    assert run.reply["status"] == "ok", run.errors
    assert value_of(kernel, "seen[-1]") == [["user", prompt]]


def test_options_keep_their_text_and_the_system_prompt_stays(kernel: Kernel) -> None:
    kernel.run(RECORD)
    system = r"Answer like {x} costs $5 \o/"
    kernel.run(f'%%mlc_chat --new --system "{system}" --temperature 0 --max-tokens 1\nHi')
    kernel.run("%%mlc_chat --temperature 0 --max-tokens 1\nAgain")
    roles = [message[0] for message in value_of(kernel, "seen[-1]")]
    assert roles == ["system", "user", "assistant", "user"]
    assert value_of(kernel, "seen[-1][0][1]") == system
    run = kernel.run(
        '%%mlc_chat --new --temperature 0 --max-tokens 40 --stop "\\n" --stop Paris -o cut\n'
        "What is the capital of France? Answer in one sentence."
    )
    assert "Paris" not in run.answer
    assert "\n" not in run.answer
    assert value_of(kernel, "cut.choices[0].finish_reason") == "stop"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%mlc_chat --max-tokens many\nHi", "argument --max-tokens: invalid int value: 'many'"),
        ("%%mlc_chat --colour red\nHi", "unrecognized arguments: --colour red"),
        ('%%mlc_chat --system "open\n Hi', "a quote is not closed"),
        ("%%mlc_chat -o 1x\nHi", "'1x' is not a variable name"),
        ("%%mlc_chat -o print\nHi", "'print' is a name of Python's or IPython's own"),
        ("%%mlc_chat -o Out\nHi", "'Out' is a name of Python's or IPython's own"),
        ("%%mlc_chat -o class\nHi", "'class' is not a variable name"),
        ("%%mlc_chat\n  \n", "the cell has no prompt"),
        ("%%mlc_chat", "the cell has no prompt"),
    ],
)
def test_a_wrong_option_is_one_line(kernel: Kernel, cell: str, said: str) -> None:
    run = kernel.run(cell)
    assert run.reply["status"] == "error"
    assert said in run.stream("stderr")
    assert len(run.stream("stderr").strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("cell", "name", "said"),
    [
        ("%%mlc_chat -m smolm2\nHi", "ModelNotFoundError", "Did you mean smollm2?"),
        ("%%mlc_chat --temperature -1\nHi", "BadRequestError", "temperature"),
        ("%%mlc_chat --max-tokens 0\nHi", "BadRequestError", "max_tokens"),
        ("%%mlc_chat --new\n" + "word " * 9000, "BadRequestError", "tokens"),
        ("%mlc_unload nothing", "ModelNotFoundError", "nothing"),
    ],
)
def test_an_error_is_one_message_and_the_cell_fails(kernel: Kernel, cell: str, name: str, said: str) -> None:
    run = kernel.run(cell)
    assert run.reply["status"] == "error"
    (error,) = run.errors
    assert error["ename"] == name
    assert error["traceback"] == [f"{name}: {error['evalue']}"]
    assert said in error["evalue"]
    assert not [data for data in run.displays.values() if data["text/plain"]]
    assert "text/markdown" not in str(run.displays)
    assert kernel.run("%%mlc_chat --new --temperature 0 --max-tokens 5\nHi").reply["status"] == "ok"


def test_a_conversation_without_room_names_the_way_out(kernel: Kernel) -> None:
    kernel.run("%%mlc_chat --new --temperature 0 --max-tokens 1\n" + "word " * 4500)
    (error,) = kernel.run("%%mlc_chat\n" + "word " * 4500).errors
    assert error["ename"] == "BadRequestError"
    assert "`%%mlc_chat --new`" in error["evalue"]
    assert kernel.run("%%mlc_chat --new --max-tokens 1\nHi").reply["status"] == "ok"


@pytest.mark.parametrize("magic", ["%%mlc_chat", "%mlc_load", "%mlc_unload", "%mlc_status", "%mlc_reset"])
def test_help_shows_the_options(kernel: Kernel, magic: str) -> None:
    run = kernel.run(f"{magic} --help")
    assert run.reply["status"] == "ok", run.errors
    assert magic.lstrip("%") in run.stream("stdout")
    assert run.stream("stderr") == ""


def test_a_conversation_outlives_the_engine_and_the_extension(kernel: Kernel) -> None:
    kernel.run(RECORD)
    kernel.run("%%mlc_chat --new --temperature 0 --max-tokens 1\nBefore")
    kernel.run("import mlc_nb\nwith mlc_nb.MLCEngine(): pass")
    assert value_of(kernel, "len(mlc_nb.engines())") == 1
    kernel.run("%mlc_unload")
    assert kernel.run("%mlc_unload").stream("stdout") == "nothing was loaded\n"
    assert kernel.run("%reload_ext mlc_nb").reply["status"] == "ok"
    kernel.run("%%mlc_chat --temperature 0 --max-tokens 1\nAfter")
    assert [text for role, text in value_of(kernel, "seen[-1]") if role == "user"] == ["Before", "After"]


def test_interrupt_keeps_what_was_said_and_the_engine_serves_on(kernel: Kernel) -> None:
    interrupted_at = 0.0

    def interrupt(run: Run) -> None:
        nonlocal interrupted_at
        if not interrupted_at and len(run.answer) > 40:
            kernel.manager.interrupt_kernel()
            interrupted_at = time.monotonic()

    kernel.run(RECORD)
    run = kernel.run(LONG + "\n", during=interrupt)
    assert time.monotonic() - interrupted_at < 1.0
    assert run.reply["status"] == "error"
    (error,) = run.errors
    assert error["ename"] == "KeyboardInterrupt"
    assert len(error["traceback"]) == 1
    assert len(run.answer) > 40
    assert "stopped by you" in run.note
    assert value_of(kernel, "[_.interrupted, _.text]") == [True, run.answer]

    after = kernel.run("%%mlc_chat --temperature 0 --max-tokens 40\nNow something else: what is the capital of France?")
    assert after.reply["status"] == "ok", after.errors
    assert [role for role, _ in value_of(kernel, "seen[-1]")] == ["user", "assistant", "user"]
    assert value_of(kernel, "seen[-1][1][1]") == run.answer
    fresh = kernel.run(
        "%%mlc_chat --new --temperature 0 --max-tokens 40\nWhat is the capital of France? Answer in one sentence."
    )
    assert "Paris" in fresh.answer
    assert value_of(kernel, "__import__('mlc_nb').engines()[0].pages_used") == 0


def test_interrupt_before_the_first_word_leaves_no_trace(kernel: Kernel) -> None:
    kernel.run(RECORD)
    kernel.run("%%mlc_chat --new --temperature 0 --max-tokens 1\nBefore")
    prompt = "word " * 6000  # seconds of prefill, however fast the machine
    message = kernel.client.execute(f"%%mlc_chat --temperature 0\n{prompt}")
    time.sleep(0.4)
    kernel.manager.interrupt_kernel()
    started = time.monotonic()
    while True:
        reply = kernel.client.get_shell_msg(timeout=20)
        if reply["parent_header"].get("msg_id") == message:
            break
    assert time.monotonic() - started < 1.0
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    kernel.run("%%mlc_chat --temperature 0 --max-tokens 1\nAfter")
    said = [text for role, text in value_of(kernel, "seen[-1]") if role == "user"]
    assert said == ["Before", "After"]


def test_interrupt_while_the_model_is_compiled(kernel: Kernel, warm_model: Path, tmp_path: Path) -> None:
    kernel.run(f"import os; home = os.environ.get('MLC_NB_HOME', ''); os.environ['MLC_NB_HOME'] = '{tmp_path}'")
    kernel.run("%mlc_unload --all")
    message = kernel.client.execute(f"%%mlc_chat -m {warm_model}\nHi")
    while not kernel.process.children():
        time.sleep(0.02)
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    started = time.monotonic()
    while True:
        reply = kernel.client.get_shell_msg(timeout=20)
        if reply["parent_header"].get("msg_id") == message:
            break
    assert time.monotonic() - started < 1.0
    assert (reply["content"]["ename"], reply["content"]["traceback"]) == (
        "KeyboardInterrupt",
        ["KeyboardInterrupt: stopped"],
    )
    assert kernel.process.children() == []
    kernel.run("os.environ['MLC_NB_HOME'] = home")
    assert kernel.run("%%mlc_chat --new --temperature 0 --max-tokens 5\nHi").reply["status"] == "ok"


def test_status_and_unload(kernel: Kernel) -> None:
    kernel.run("%mlc_unload --all")
    (loaded,) = kernel.run("%mlc_load").displays.values()
    assert loaded["text/plain"] == "smollm2 is loaded"
    shown = kernel.run("%mlc_status").of_type("display_data")[0]["data"]
    assert "smollm2" in shown["text/plain"]
    assert "<table>" in shown["text/html"]
    assert re.search(r"cpu: [\d,.]+ MiB free of [\d,.]+ MiB, [\d,.]+ MiB in this process", shown["text/plain"])
    assert value_of(kernel, "len(__import__('mlc_nb').engines())") == 1
    assert kernel.run("%mlc_unload").stream("stdout") == "unloaded smollm2\n"
    assert value_of(kernel, "__import__('mlc_nb').engines()") == []
    assert "No engine" in kernel.run("%mlc_status").of_type("display_data")[0]["data"]["text/plain"]
    assert kernel.run("%%mlc_chat --new --temperature 0 --max-tokens 4\nHi").reply["status"] == "ok"
    assert kernel.run("%mlc_unload --all").stream("stdout") == "unloaded smollm2\n"


def test_the_extension_loads_once_and_unloads_whole(kernel: Kernel) -> None:
    state = """
ip = get_ipython()
state = lambda: (
    sorted(name for kind in ip.magics_manager.magics.values() for name in kind if name.startswith("mlc")),
    len(ip.input_transformers_cleanup), [type(c).__name__ for c in ip.configurables].count("MLCMagics"),
    "do_shutdown" in vars(ip.kernel), len(ip.events.callbacks["pre_run_cell"]),
)
"""
    kernel.run(state)
    loaded = value_of(kernel, "state()")
    kernel.run("%reload_ext mlc_nb")
    kernel.run("import mlc_nb; mlc_nb.load_ipython_extension(ip)")
    assert value_of(kernel, "state()") == loaded
    names, transforms, configurables, wrapped, callbacks = loaded  # type: ignore[misc]
    assert {"mlc", "mlc_chat", "mlc_load", "mlc_reset", "mlc_status", "mlc_unload"} <= set(names)
    assert (configurables, wrapped) == (1, True)
    kernel.run("%unload_ext mlc_nb")
    assert value_of(kernel, "state()") == [[], transforms - 1, 0, False, callbacks - 1]
    assert kernel.run("%load_ext mlc_nb").reply["status"] == "ok"


@pytest.mark.parametrize("seconds", [0.05, 0.3])
def test_interrupt_of_the_very_first_cell_leaves_a_kernel_that_works(fresh_kernel: Kernel, seconds: float) -> None:
    # Half an import of a native module would stay half for ever.
    fresh_kernel.run("%load_ext mlc_nb")
    threading.Timer(seconds, fresh_kernel.process.send_signal, [signal.SIGINT]).start()
    run = fresh_kernel.run("%%mlc_chat --temperature 0 --max-tokens 300\nTell me a story.")
    assert run.errors[0]["traceback"] == ["KeyboardInterrupt: stopped"]
    assert run.seconds < 2
    assert fresh_kernel.run("%%mlc_chat --temperature 0 --max-tokens 5\nHi").reply["status"] == "ok"
    assert fresh_kernel.complaints == ""
