"""``{name}`` in a prompt, where the user asks for it; every other character of the prompt stays what it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["interpolate"]

# Doubled braces are those of templates, not ours.
_PLACE = re.compile(r"(?<!\{)\{([^\W\d]\w*)\}(?!\})")


def interpolate(text: str, namespace: Mapping[str, Any], names: Collection[str] | None = None) -> tuple[str, list[str]]:
    """Put the values of variables into ``text``, as ``str`` writes them; what is put in is not looked at again.

    Parameters
    ----------
    names
        The only variables to put in; None takes all of ``namespace``.

    Returns
    -------
    tuple
        The text, and the names that were not put in: those in braces that are no variables, or those of ``names`` that
        stand nowhere in the text.

    Raises
    ------
    UsageError
        One of ``names`` is no variable.
    """
    for name in names or ():
        if name not in namespace:
            raise UsageError(f"--var {name}: there is no variable {name!r}")
    found = dict.fromkeys(_PLACE.findall(text))
    wanted = {name for name in found if name in namespace} if names is None else set(names)
    missed = [name for name in (found if names is None else names) if name not in namespace or name not in found]
    return _PLACE.sub(lambda place: str(namespace[place[1]]) if place[1] in wanted else place[0], text), missed
