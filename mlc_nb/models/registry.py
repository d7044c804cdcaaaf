"""The architecture families that can be compiled, by the name that model files use. Imports no compiler."""

from __future__ import annotations

__all__ = ["ARCHITECTURES", "architecture_module"]

from mlc_nb.errors import ModelFormatError

ARCHITECTURES = {"llama": "mlc_nb.models.llama"}
"""``general.architecture`` of GGUF files -> the module of the family."""


def architecture_module(architecture: str) -> str:
    """Name of the module that builds an architecture.

    Raises
    ------
    ModelFormatError
        If the architecture is not supported; the message names it and those that are.
    """
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelFormatError(
            f"the model's architecture is {architecture!r}; this version can run: {known}. Choose a model of one of "
            "these."
        ) from None
