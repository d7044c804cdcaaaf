"""The architecture families that can be compiled, by the name that model files use. Imports no compiler."""

from __future__ import annotations

__all__ = ["ARCHITECTURES", "CUDA_ARCHITECTURES", "architecture_module"]

from mlc_nb.errors import ModelFormatError

ARCHITECTURES = {"llama": "mlc_nb.models.llama"}
"""``general.architecture`` of GGUF files -> the module of the family."""


CUDA_ARCHITECTURES = {"llama": "mlc_nb.models.llama_cuda"}
"""The same for GPUs."""


def architecture_module(architecture: str, *, for_cuda: bool = False) -> str:
    """Name of the module that builds an architecture.

    Raises
    ------
    ModelFormatError
        If the architecture is not supported; the message names it and those that are.
    """
    modules = CUDA_ARCHITECTURES if for_cuda else ARCHITECTURES
    try:
        return modules[architecture]
    except KeyError:
        place = " on a GPU" if for_cuda else ""
        another = " or device='cpu'" if for_cuda and architecture in ARCHITECTURES else ""
        raise ModelFormatError(
            f"the model's architecture is {architecture!r}; this version can run{place}: {', '.join(sorted(modules))}. "
            f"Choose a model of one of these{another}."
        ) from None
