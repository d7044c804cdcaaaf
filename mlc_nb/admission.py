"""Who gets in when memory is short: limits, which idle engines have to go, and how long an idle one may stay."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mlc_nb.errors import BadRequestError, EngineTerminatedError
from mlc_nb.protocol.common import short_repr
from mlc_nb.runtime.devices import resolve_device
from mlc_nb.runtime.memory import MemoryRow, device_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlc_nb.engine.core import EngineCore

__all__ = ["MemoryPolicy", "SharedRoom", "Tenant", "configure_memory", "measured_bytes", "memory_policy"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """What to do where engines want more memory than there is.

    Attributes
    ----------
    memory_limits
        By device, bytes that all engines of this process together may take.
    evict
        Whether idle engines are unloaded, the one idle longest first, when another one needs their memory.
    keep_alive
        Seconds after which an idle engine is unloaded; None keeps it.
    """

    memory_limits: Mapping[str, int] = field(default_factory=dict)
    evict: bool = True
    keep_alive: float | None = None


class _Unset(Enum):
    """Stands for what was not given, where None means something."""

    UNSET = 0


_UNSET = _Unset.UNSET
_policy: MemoryPolicy = globals().get("_policy") or MemoryPolicy()  # see registry


def memory_policy() -> MemoryPolicy:
    """Return what holds now."""
    return _policy


def configure_memory(
    *,
    memory_limit: float | str | Mapping[str, float | str | None] | _Unset | None = _UNSET,
    evict: bool | None = None,
    keep_alive: float | _Unset | None = _UNSET,
) -> MemoryPolicy:
    """Change what happens where memory is short; what is not given stays as it is.

    Parameters
    ----------
    memory_limit
        Most memory that the engines of this process may take together, for loads and resizes from now on: a number of
        bytes or a text such as ``"2.5 GiB"``, for the device ``auto`` stands for or, in a mapping, by device. None
        takes the limit away.
    evict
        Whether idle engines make room for new ones. ``EngineConfig(pinned=True)`` keeps a single one from it.
    keep_alive
        Seconds after which engines that have nothing to do are unloaded; None keeps them.
        ``EngineConfig(keep_alive=...)`` goes before it.

    Returns
    -------
    MemoryPolicy
        What holds from now on.

    Raises
    ------
    BadRequestError
        A value is none that can hold.
    """
    global _policy
    policy = _policy
    if not isinstance(memory_limit, _Unset):
        given = memory_limit if isinstance(memory_limit, Mapping) else {"auto": memory_limit}
        limits = dict(policy.memory_limits)
        for device, limit in given.items():
            limits.pop(resolve_device(device), None)
            if limit is not None:
                limits[resolve_device(device)] = _size(limit)
        policy = replace(policy, memory_limits=limits)
    if evict is not None:
        policy = replace(policy, evict=bool(evict))
    if not isinstance(keep_alive, _Unset):
        if keep_alive is not None and not (isinstance(keep_alive, int | float) and keep_alive >= 0):
            raise BadRequestError(f"keep_alive must be a number of seconds or None, got {short_repr(keep_alive)}.")
        policy = replace(policy, keep_alive=keep_alive)
    _policy = policy
    return policy


def _size(value: object) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**63:
        return int(value)
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]I?)?B?", str(value).strip().upper())
    if isinstance(value, str) and match is not None and float(match[1]) > 0:
        return int(float(match[1]) * _UNITS[match[2] or ""])
    raise BadRequestError(f"memory_limit must be bytes or a text such as '2.5 GiB', got {short_repr(value)}.")


class Tenant(Protocol):
    """An engine that holds, or is about to hold, memory of a device."""

    pinned: bool
    planned_bytes: int

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def device(self) -> str:
        """Where it is."""

    @property
    def core(self) -> EngineCore | None:
        """The engine; None while it is being loaded."""


TenantT = TypeVar("TenantT", bound=Tenant)


class SharedRoom(Generic[TenantT]):
    """Implements `Room` for one of several engines of a process.

    What others were granted and have not touched yet, such as pages of their KV caches, is theirs all the same.

    Parameters
    ----------
    tenant
        The engine that wants memory.
    tenants
        Returns all engines of the process.
    remove
        Ends engines.
    """

    def __init__(
        self, tenant: TenantT, tenants: Callable[[], Sequence[TenantT]], remove: Callable[[list[TenantT]], None]
    ) -> None:
        self._tenant = tenant
        self._tenants = tenants
        self._remove = remove

    def free_bytes(self) -> int:
        """Bytes of the device that are free and promised to nobody, with those that the engine holds already."""
        promised = sum(max(0, other.planned_bytes - measured_bytes(other)) for other in self._others())
        free = device_memory(self._tenant.device).free_bytes()
        return max(0, free - promised + measured_bytes(self._tenant))

    def most_bytes(self) -> int | None:
        """What the limit of the device leaves."""
        limit = _policy.memory_limits.get(self._tenant.device)
        return None if limit is None else limit - sum(other.planned_bytes for other in self._others())

    def make(self, missing: int) -> bool:
        """Unload idle engines, the one idle longest first, if that frees so much; tell the user."""
        if not _policy.evict:
            return False
        idle = [(_idle_seconds(other), other) for other in self._others() if not other.pinned]
        leaving: list[TenantT] = []
        for seconds, other in sorted(idle, key=lambda pair: -pair[0]):
            if seconds > 0 and sum(chosen.planned_bytes for chosen in leaving) < missing:
                leaving.append(other)
        if sum(chosen.planned_bytes for chosen in leaving) < missing:
            return False
        for other in leaving:
            _log.warning(
                "Unloading %s, idle for %.0f s, to make room for %s. EngineConfig(pinned=True) keeps an engine; "
                "mlc_nb.configure_memory(evict=False) keeps all of them.",
                other.name,
                _idle_seconds(other),
                self._tenant.name,
            )
        self._remove(leaving)
        return True

    def take(self, size: int) -> None:
        """Have so many bytes counted as this engine's."""
        self._tenant.planned_bytes = size

    def others(self) -> list[MemoryRow]:
        """The other engines of the device, and what they were granted."""
        return [MemoryRow(other.name, other.planned_bytes) for other in self._others()]

    def _others(self) -> list[TenantT]:
        return [other for other in self._tenants() if other is not self._tenant and other.device == self._tenant.device]


def measured_bytes(tenant: Tenant) -> int:
    """Bytes that an engine holds now; 0 before it is ready and after its end."""
    try:
        return 0 if tenant.core is None else tenant.core.memory().total
    except EngineTerminatedError:
        return 0


def _idle_seconds(tenant: Tenant) -> float:
    """0 for an engine that is busy or still being loaded."""
    return 0.0 if tenant.core is None or tenant.core.state != "ready" else tenant.core.idle_seconds
