"""A Jinja sandbox for templates of strangers: no access to Python, no changes to its inputs, bounded work.

The clock is looked at in every loop iteration, call, filter and operator, so loops and recursion end. Text and lists
are charged before they are built, so nothing fills the memory. What cannot be bounded is not offered.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlc_nb.protocol.bounded_operations import (
    BOUNDED_FILTERS,
    charge_format,
    charge_operator,
    charge_text_method,
    clocked,
    joined,
)
from mlc_nb.protocol.template_limits import current_limits, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.parser import Parser
    from jinja2.runtime import Context

__all__ = ["BoundedEnvironment", "TemplateRefusedError"]

_MAX_DATE_FORMAT = 256


class TemplateRefusedError(TemplateError):
    """The template called ``raise_exception``; the message is its own."""


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusedError(str(message))


def _strftime_now(date_format: str) -> str:
    if len(date_format) > _MAX_DATE_FORMAT:
        raise SecurityError(f"a date format of more than {_MAX_DATE_FORMAT} characters.")
    return datetime.datetime.now().strftime(date_format)


@pass_context  # which also keeps the compiler from writing constants itself, outside of the limits
def _write(_: Context, value: Any) -> str:
    return written(value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment for chat templates, bounded; render inside `template_limits.limited`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would run expressions while it compiles, outside of the limits
            finalize=_write,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.filters = dict(BOUNDED_FILTERS)
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: clocked(test) for name, test in tests.items()}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounder().visit(source), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an arithmetic operator."""
        charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the bounded form of a text's ``format``, None for anything else."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            charge_format(value.__self__, args, kwargs)
            return sandboxed(*args, **kwargs)

        return bounded

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a macro or a method."""
        limits = current_limits()
        limits.look_at_clock()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, int | float):
            raise SecurityError(f"methods of numbers ({name}) are not offered to templates.")
        if isinstance(owner, str):
            charge_text_method(owner, name, args)
            if name == "join" and len(args) == 1:
                return joined(owner, args[0])
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, list | tuple | dict):
            limits.charge_tree(result)
        return result

    def step(self, cost: int) -> bool:
        """Pay for one iteration of a loop, which writes ``cost`` characters of plain text; true."""
        current_limits().charge_characters(cost)
        return True

    def built(self, value: Any) -> Any:
        """Pay for a list or mapping that the template wrote; the value itself."""
        current_limits().charge_tree(value)
        return value

    def concatenated(self, *parts: Any) -> str:
        """Join the operands of ``~``."""
        return joined("", parts)


class _Bounder(NodeTransformer):
    """Puts the environment's checks where the compiled template would not call it."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the name that jinja2's visitor looks for
        cost = _plain_text(node.body)
        self.generic_visit(node)
        step = _environment_call("step", nodes.Const(cost))
        node.body.insert(0, nodes.ExprStmt(step))
        if node.test is not None:
            node.test = nodes.And(_environment_call("step", nodes.Const(1)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self._charge_body(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        self._charge_body(node)
        return node

    def _charge_body(self, node: nodes.Macro | nodes.CallBlock) -> None:
        cost = _plain_text(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("step", nodes.Const(cost))))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _environment_call("concatenated", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        return self._built(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        return self._built(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        return self._built(node) if node.ctx == "load" else node

    def _built(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _environment_call("built", node)


def _environment_call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _plain_text(body: list[nodes.Node]) -> int:
    return 1 + sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's words for training; here its body is simply written."""

    tags = {"generation"}  # noqa: RUF012 - Extension declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
