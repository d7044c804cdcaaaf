"""The one error tree. Every message says what was wanted, what was found and what to do next."""

from __future__ import annotations

__all__ = [
    "BadRequestError",
    "CompileError",
    "DeviceUnavailableError",
    "EngineTerminatedError",
    "MLCError",
    "ModelFormatError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "RequestAborted",
    "WeightIntegrityError",
]


class MLCError(Exception):
    """Base of every error that mlc_nb raises on purpose."""


class ModelNotFoundError(MLCError):
    """The model, its package, its repository or its file does not exist or cannot be reached."""


class ModelFormatError(MLCError):
    """The model was found, but its files are not in a form that this version can run."""


class WeightIntegrityError(MLCError):
    """Downloaded or cached weights do not have the size or the hash that their index gives."""


class CompileError(MLCError):
    """The compiler's child process failed; the message holds its last lines."""


class DeviceUnavailableError(MLCError):
    """The wanted device does not exist here, or it failed while in use."""


class OutOfMemoryError(MLCError):
    """The model, its KV cache or a request does not fit in the memory that is free."""


class BadRequestError(MLCError, ValueError):
    """A request or a configuration value is invalid; the message names the field."""


class EngineTerminatedError(MLCError, ValueError):
    """The engine was terminated (or failed) before this call."""


class RequestAborted(MLCError):
    """The request was aborted before it finished."""
