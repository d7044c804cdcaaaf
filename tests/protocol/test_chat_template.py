from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlc_nb.errors import BadRequestError, ModelFormatError
from mlc_nb.protocol.chat_template import ChatTemplate
from mlc_nb.weights.gguf_file import GGUFFile

if TYPE_CHECKING:
    from pathlib import Path

USER = [{"role": "user", "content": "hi"}]


def _render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(USER if messages is None else messages, **options)


@pytest.fixture(scope="module")
def smollm2_source(smollm2_path: Path) -> str:
    with GGUFFile.open(smollm2_path) as file:
        return str(file.metadata["tokenizer.chat_template"])


def test_golden_prompts_are_rendered_exactly(smollm2_source: str, golden: dict[str, Any]) -> None:
    template = ChatTemplate(smollm2_source, bos_token="<|im_start|>", eos_token="<|im_end|>")
    for prompt in golden["prompts"]:
        assert template.render(prompt["messages"]) == prompt["rendered"], prompt["name"]


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text()), min_size=1, max_size=5))
def test_contents_reach_the_prompt_untouched(smollm2_source: str, turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = ChatTemplate(smollm2_source, bos_token="", eos_token="").render(messages)
    assert rendered.endswith(
        "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + "<|im_start|>assistant\n"
    )


# In the manner of published templates: system text, tools, reasoning cut from history, roles that alternate, loop
# controls, macros, namespaces.
QWEN_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- content }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
            {%- set arguments = tool_call.function.arguments %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA_LIKE = """\
{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- macro header(role) %}{{ "<|start_header_id|>" ~ role ~ "<|end_header_id|>\\n\\n" }}{% endmacro %}
{{- header("system") + "Today Date: " + date_string + "\\n\\n" }}
{%- for message in messages if message.role != 'system' %}
    {%- if loop.index0 == 9 %}{% break %}{% endif %}
    {%- if not message.content %}{% continue %}{% endif %}
    {%- if message.content is iterable and message.content is not string %}
        {%- for part in message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') %}
            {{- header(message['role']) + part | trim + '<|eot_id|>' }}
        {%- endfor %}
    {%- else %}
        {{- header(message['role']) + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
    {% if add_generation_prompt %}
{{- header('assistant') }}
    {% endif %}
{{ ["a", 1, none] | join(", ") }} {{ {"b": [1.5, true], "a": "<é&'>"} | tojson(indent=2) }}
{{ "%s-%03d" % ("x", 7) }} {{ "{:>4}|{}".format("y", 3) }} {{ "-" * 5 }} {{ [1] + [2] * 2 }} {{ 7 // 2 ** 2 }}
"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    USER,
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ 7 * 7 }} {% raw %} $x <b>&amp;</b>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb", "tool_calls": None},
        {"role": "user", "content": [{"type": "text", "text": " c "}, {"type": "image_url", "image_url": "x"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"q": "é"}}}],
        },
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<look> & 'find'", "parameters": {"ü": [1]}}}]


def _plain_jinja(source: str) -> Any:
    """The environment that Hugging Face documents for chat templates, with nothing bounded."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source.replace("{% generation %}", "").replace("{% endgeneration %}", ""))


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [QWEN_LIKE, LLAMA_LIKE], ids=["qwen", "llama"])
def test_bounds_change_nothing_that_a_published_template_does(source: str, messages: Any, tools: Any) -> None:
    for opened in (True, False):
        plain = _plain_jinja(source).render(
            messages=messages, tools=tools, add_generation_prompt=opened, bos_token="<s>", eos_token="</s>"
        )
        assert _render(source, messages, tools=tools, add_generation_prompt=opened) == plain


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": role, "content": "word " * 2000} for role in ("user", "assistant")] * 200
    assert len(_render(QWEN_LIKE, messages)) > 4_000_000


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(BadRequestError, match="refuses them: Roles must alternate!"):
        _render("{{ raise_exception('Roles must alternate!') }}")


@pytest.mark.parametrize(
    "source",
    ["{{ messages[5].content }}", "{{ 1 + 'a' }}", "{{ messages.a.b }}", "{{ 'x'.index('y') }}", "{{ 1 / 0 }}"],
)
def test_failures_on_the_messages_are_bad_requests(source: str) -> None:
    with pytest.raises(BadRequestError, match="messages: the model's chat template fails on them: "):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for",
        "{{ x|nofilter }}",
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{{ " + "-" * 100_000 + "1 }}",
        "x" * 300_000,
        "{{ " + "(" * 300 + ")" * 300 + " }}",
        "{% include 'x' %}{% if %}",
        "{% unknown %}",
    ],
    ids=["open", "filter", "blocks", "signs", "long", "parentheses", "if", "tag"],
)
def test_invalid_sources_are_format_errors(source: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template"):
        ChatTemplate(source, bos_token="", eos_token="")
