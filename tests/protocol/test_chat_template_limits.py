"""A template is a program of strangers: it reaches nothing, changes nothing, and ends soon."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from mlc_nb.errors import BadRequestError, ModelFormatError
from mlc_nb.protocol import template_limits
from mlc_nb.protocol.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def _render(source: str) -> str:
    return ChatTemplate(source, bos_token="", eos_token="").render(MESSAGES)


def _doubling(step: str, start: str = "'aaaaaaaa'") -> str:
    return "{% set n = namespace(x=" + start + ") %}{% for i in range(99) %}" + step + "{% endfor %}{{ n.x }}"


ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop filters": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "lazy filters": "{% for i in range(99999) %}{{ range(99999) | select('odd') | list | length }}{% endfor %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "recursive macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "branching macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "searches": "{% set x = 'a ' * 4000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "test searches": "{% set x = 'a ' * 4000000 %}{{ ('b' * 99999) | select('in', x) | list }}",
}

HUGE = {
    "text times number": "{{ 'a' * 10**10 }}",
    "number times text": "{{ 10**10 * 'a' }}",
    "list times number": "{{ ([0] * 10**9) | length }}",
    "doubled by ~": _doubling("{% set n.x = n.x ~ n.x %}"),
    "doubled by +": _doubling("{% set n.x = n.x + n.x %}"),
    "doubled by a block": _doubling("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "doubled by replace": _doubling("{% set n.x = n.x | replace('a', n.x) %}"),
    "doubled by text.replace": _doubling("{% set n.x = n.x.replace('a', n.x) %}"),
    "doubled by join": _doubling("{% set n.x = [n.x, n.x] | join %}"),
    "doubled by text.join": _doubling("{% set n.x = n.x.join(['a', n.x, n.x]) %}"),
    "doubled by format": _doubling("{% set n.x = '{0}{0}'.format(n.x) %}"),
    "doubled by %": _doubling("{% set n.x = '%s%s' % (n.x, n.x) %}"),
    "doubled lists": _doubling("{% set n.x = [n.x, n.x] %}"),
    "doubled mappings": _doubling("{% set n.x = {'a': n.x, 'b': n.x} %}"),
    "doubled by dict": _doubling("{% set n.x = dict(a=n.x, b=n.x) %}"),
    "added lists": _doubling("{% set n.x = n.x + n.x %}", "[1]"),
    "squares": _doubling("{% set n.x = n.x * n.x %}", "7"),
    "powers": "{{ 10 ** (10 ** 10) }}",
    "plain text": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "plain text in macros": "{% macro m() %}"
    + "x" * 1000
    + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "% width": "{{ '%1000000000d' % 1 }}",
    "% computed width": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format computed width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "padding": "{{ 'a'.center(10**9) }}",
    "indent": "{{ 'a' | indent(10**9, true) }}",
    "json indent": "{{ [1] | tojson(indent=10**9) }}",
    "json of one text many times": "{{ ['a' * 1000000] * 1000 | tojson }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "list of characters": "{{ ('a' * 30000000) | list | length }}",
    "split": "{{ ('a ' * 15000000).split() | length }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(10**6) }}",
    "namespaces": _doubling("{% set n.x = namespace(a=n.x, b=n.x) %}"),
}

FORBIDDEN = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "attr filter": "{{ (messages | attr('__class__')).x }}",
    "macro internals": "{% macro m() %}{% endmacro %}{{ m._func.x }}",
    "changed messages": "{{ messages.append(1) }}",
    "changed message": "{{ messages[0].update({'role': 'x'}) }}",
    "other text methods": "{{ 'a'.encode() }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_every_render_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)  # the real limit would only make the test slower
    start = time.thread_time()
    with pytest.raises(BadRequestError, match="messages: "):
        _render(source)
    assert time.thread_time() - start < 2


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE.keys())
def test_no_render_fills_the_memory(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((BadRequestError, ModelFormatError), match="chat template"):
            _render(source)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ModelFormatError, match="tries what is forbidden to it"):
        _render(source)
    assert MESSAGES == [{"role": "user", "content": "hi"}]


def test_private_attributes_in_a_format_are_empty() -> None:
    assert _render("{{ '[{0.__class__}]'.format(messages) }}") == "[]"


@pytest.mark.parametrize("name", ["lipsum", "self", "environment", "context", "open", "__import__", "config"])
def test_nothing_of_python_is_in_reach_by_name(name: str) -> None:
    with pytest.raises((BadRequestError, ModelFormatError)):
        _render("{{ " + name + ".x.y }}")


def test_limits_are_of_one_render() -> None:
    template = ChatTemplate("{{ ('a' * 9000000)[:1] }}", bos_token="", eos_token="")
    assert [template.render(MESSAGES) for _ in range(20)] == ["a"] * 20
