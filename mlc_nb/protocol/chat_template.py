"""Chat templates: the Jinja text that a model brings along and that turns messages into its prompt."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from mlc_nb.errors import BadRequestError, ModelFormatError
from mlc_nb.protocol.bounded_jinja import BoundedEnvironment, TemplateRefusedError
from mlc_nb.protocol.template_limits import TemplateLimitError, limited

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ChatTemplate"]

_MAX_SOURCE_CHARACTERS = 1 << 18


class ChatTemplate:
    """A model's chat template, compiled for a sandbox.

    The template comes with the model and is not trusted: it sees its variables and nothing else, changes none of
    them, and a render is bounded in processor time and in text (see `mlc_nb.protocol.bounded_jinja`).

    Parameters
    ----------
    source
        Jinja source in the dialect of Hugging Face's `apply_chat_template`.
    bos_token, eos_token
        Text of the model's special tokens, which templates write themselves.

    Raises
    ------
    ModelFormatError
        The source is no valid template.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise ModelFormatError(
                f"The model's chat template has {len(source)} characters; the limit is {_MAX_SOURCE_CHARACTERS}."
            )
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = BoundedEnvironment()
        try:
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ModelFormatError(f"The model's chat template is invalid at line {error.lineno}: {error}") from error
        except (SyntaxError, RecursionError, MemoryError, ValueError, TypeError, TemplateError) as error:
            raise ModelFormatError(f"The model's chat template cannot be compiled: {error}") from error

    @property
    def uses_tools(self) -> bool:
        """Whether the template writes the tools that it is given."""
        return "tools" in self._variables

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Write messages as the text that the model was trained on.

        Parameters
        ----------
        messages
            The conversation in OpenAI's form: ``role``, ``content`` and so on.
        add_generation_prompt
            Whether the text ends with the opening of the assistant's answer.
        tools
            Function schemas in OpenAI's form.

        Raises
        ------
        BadRequestError
            The template refuses these messages (in its own words), fails on them, or exceeds its limits.
        ModelFormatError
            The template tries what the sandbox forbids.
        """
        with _teaching_errors(), limited():
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )


@contextlib.contextmanager
def _teaching_errors() -> Iterator[None]:
    try:
        yield
    except TemplateRefusedError as error:
        raise BadRequestError(f"messages: the model's chat template refuses them: {error}") from error
    except TemplateLimitError as error:
        raise BadRequestError(f"messages: rendering the model's chat template {error}.") from error
    except SecurityError as error:
        raise ModelFormatError(f"The model's chat template tries what is forbidden to it: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise BadRequestError("messages: the model's chat template recurses too deeply.") from error
    except Exception as error:  # a template can raise whatever its expressions can
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise BadRequestError(f"messages: the model's chat template fails on them: {kind}{error}") from error
