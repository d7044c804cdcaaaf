"""One engine core for each model and configuration in this process, however it is asked for.

``MLCEngine(...)``, ``AsyncMLCEngine(...)``, `get_engine` and the magics all get their core here, so a cell that is run
twice does not load twice. Handles are cheap: after `unload` nothing that a notebook still refers to (``_``, ``Out``,
tracebacks) keeps a model in memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlc_nb import lifecycle, presence
from mlc_nb.accounts import EngineRow, EngineState, MemoryTable, row_of, table_of
from mlc_nb.admission import SharedRoom, measured_bytes, memory_policy
from mlc_nb.engine.provider import create_core, set_core_provider
from mlc_nb.errors import BadRequestError, EngineTerminatedError, MLCError, ModelNotFoundError, OutOfMemoryError
from mlc_nb.presence import EngineOfProcess
from mlc_nb.runtime.devices import resolve_device
from mlc_nb.weights.source import ALIASES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlc_nb.engine.core import EngineCore
    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.protocol.engine_config import EngineConfig

__all__ = ["EngineRow", "MemoryTable", "engines", "get_engine", "is_loaded", "memory_table", "model_key", "unload"]

_WAIT_S = 0.1  # between two looks at the clock, so that Ctrl-C lands
_KEEPER_S = 0.5  # between two looks at idle engines
_log = logging.getLogger(__name__)

# Fields of a configuration that make no two engines of one.
_OF_NO_ACCOUNT = {"model": None, "pinned": False, "keep_alive": None}


@dataclass(frozen=True, slots=True)
class _Key:
    """What makes two engines the same."""

    model: str
    device: str
    model_lib: str | None
    config: EngineConfig


@dataclass(slots=True, eq=False)
class _Entry:
    """A core, or the place of one that is being loaded by the thread that made the entry."""

    key: _Key
    name: str
    core: EngineCore | None = None
    error: BaseException | None = None
    cancelled: bool = False
    pinned: bool = False
    keep_alive: float | None = None
    planned_bytes: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def device(self) -> str:
        return self.key.device

    @property
    def state(self) -> EngineState:
        if self.core is not None:
            if self.core.holders.ended:
                return "terminated"
            return "loading" if self.core.state == "starting" else self.core.state
        return "terminated" if self.cancelled else "failed" if self.error is not None else "loading"


class _Registry:
    """The entries of this process; a forked child starts with none and leaves its parent's alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}
        self._keeper: threading.Thread | None = None

    def acquire(self, model: str, device: str, model_lib: str | None, config: EngineConfig) -> EngineCore:
        """Return the ready core of this model and configuration; whoever comes first loads it, others wait."""
        lifecycle.at_end(_terminate_all)
        key = _key(model, device, model_lib, config)
        while True:
            with self._lock:
                entry = self._entries.get(key)
                mine = entry is None or entry.state in ("failed", "terminated")
                if entry is None or mine:
                    entry = self._entries[key] = _Entry(key, model)
                entry.pinned = entry.pinned or config.pinned
                entry.keep_alive = entry.keep_alive if config.keep_alive is None else config.keep_alive
            self._watch_idle_engines()
            if mine:
                self.tell()
                return self._load(entry, config)
            while not entry.done.wait(_WAIT_S):
                pass
            if entry.core is not None:
                return entry.core
            if isinstance(entry.error, MLCError):
                raise entry.error
            # Its loader was interrupted or cancelled: this caller may load it.

    def entries(self) -> list[_Entry]:
        with self._lock:
            return list(self._entries.values())

    def remove(self, entries: list[_Entry]) -> None:
        """Take entries out and terminate their cores; what is still loading is terminated once it is loaded."""
        with self._lock:
            for entry in entries:
                entry.cancelled = True
                if self._entries.get(entry.key) is entry:
                    del self._entries[entry.key]
        cores = [entry.core for entry in entries if entry.core is not None]
        for core in cores:
            core.begin_terminate()
        for core in cores:
            core.terminate()
        self.tell()

    def _failed(self, entry: _Entry, error: BaseException) -> None:
        with self._lock:
            entry.error = error
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def tenants(self) -> list[_Entry]:
        """Engines that hold memory or are about to."""
        return [entry for entry in self.entries() if entry.state in ("loading", "ready")]

    def _watch_idle_engines(self) -> None:
        """Have a thread unload idle engines, once any of them has a time after which to do so."""
        wanted = memory_policy().keep_alive is not None or any(e.keep_alive is not None for e in self.entries())
        with self._lock:
            if wanted and self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="mlc_nb-keeper", daemon=True)
                self._keeper.start()

    def _keep(self) -> None:
        while True:
            for entry in self.tenants():
                limit = memory_policy().keep_alive if entry.keep_alive is None else entry.keep_alive
                if limit is None or entry.pinned or entry.core is None or entry.core.idle_seconds < max(limit, 1e-3):
                    continue
                _log.warning("Unloading %s, which was idle for %.0f s.", entry.name, entry.core.idle_seconds)
                self.remove([entry])
            time.sleep(_KEEPER_S)

    def tell(self) -> None:
        """Let other processes know which engines there are."""
        presence.publish([_told(entry) for entry in self.tenants()])

    def _load(self, entry: _Entry, config: EngineConfig) -> EngineCore:
        key = entry.key
        try:
            core = create_core(
                entry.name, key.device, key.model_lib, config, SharedRoom(entry, self.tenants, self.remove)
            )
            with self._lock:
                cancelled = entry.cancelled
                entry.core = None if cancelled else core
                core.on_end = self.tell
            if cancelled:
                core.terminate()
                raise EngineTerminatedError(f"{entry.name} was unloaded while it was being loaded: load it again.")
        except MemoryError as error:  # Python's own, from whatever was being made
            refusal = OutOfMemoryError(
                f"The memory ran out while {entry.name} was being loaded: free some, and try again."
            )
            self._failed(entry, refusal)
            raise refusal from error
        except BaseException as error:
            self._failed(entry, error)
            raise
        finally:
            entry.done.set()
            self.tell()
        return core


# %autoreload runs a changed module again in its old namespace: what lives stays, here and in `lifecycle`, `presence`
# and `child`.
_registry: _Registry = globals().get("_registry") or _Registry()


def get_engine(
    model: str | os.PathLike[str] | None = None,
    device: str = "auto",
    *,
    model_lib: str | os.PathLike[str] | None = None,
    mode: str = "local",
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
) -> MLCEngine:
    """Return the engine of this process for a model and configuration, loading it if need be.

    The same as `MLCEngine`, whose parameters and errors these are; concurrent calls load once.

    Examples
    --------
    >>> engine = get_engine("smollm2")
    """
    from mlc_nb.engine.engine import MLCEngine

    return MLCEngine(model, device, model_lib=model_lib, mode=mode, engine_config=engine_config)


def engines() -> list[EngineRow]:
    """Return a row for each engine of this process, in the order of loading."""
    return [row_of(entry) for entry in _registry.entries() if entry.state != "terminated"]


def memory_table(device: str = "auto") -> MemoryTable:
    """Measure who holds which memory of a device.

    Raises
    ------
    DeviceUnavailableError
        There is no such device here.
    """
    return table_of(resolve_device(device), _registry.tenants())


def is_loaded(model: str | os.PathLike[str]) -> bool:
    """Whether some engine of this model is ready."""
    return any(entry.key.model == model_key(model) and entry.state == "ready" for entry in _registry.entries())


def unload(model: str | os.PathLike[str] | None = None, *, all: bool = False) -> list[str]:  # noqa: A002 - the public name
    """Terminate engines and give their memory back, whoever still refers to them.

    Parameters
    ----------
    model
        Every engine of this model; None takes the only loaded one.
    all
        Every engine of this process.

    Returns
    -------
    list of str
        The models that were unloaded, one entry an engine; with ``all`` it may be empty.

    Raises
    ------
    ModelNotFoundError
        No engine of this model is loaded.
    BadRequestError
        Neither a model nor ``all`` was given and several are loaded, or both were given.
    """
    if all and model is not None:
        raise BadRequestError("unload takes a model or all=True, not both.")
    entries = [entry for entry in _registry.entries() if entry.state != "terminated"]
    if not all:
        loaded = ", ".join(sorted({entry.name for entry in entries})) or "none"
        if model is not None:
            entries = [entry for entry in entries if entry.key.model == model_key(model)]
        if not entries:
            raise ModelNotFoundError(f"No engine {f'of {model} ' if model else ''}is loaded here. Loaded: {loaded}.")
        if model is None and len({entry.key.model for entry in entries}) > 1:
            raise BadRequestError(f"Several models are loaded ({loaded}): name one, or unload all of them.")
    _registry.remove(entries)
    return [entry.name for entry in entries]


def model_key(model: str | os.PathLike[str]) -> str:
    """Return one name for all the ways to write the same model; does not look whether it exists."""
    name = os.fsdecode(model)
    name = ALIASES.get(name, name)
    if "://" in name:
        return name
    return os.path.realpath(os.path.expanduser(name))  # noqa: PTH111 - a name may be no possible path


def _key(model: str, device: str, model_lib: str | None, config: EngineConfig) -> _Key:
    # The name of the model is a part of the configuration too; two names of one model make no difference.
    return _Key(model_key(model), resolve_device(device), model_lib, config.model_copy(update=_OF_NO_ACCOUNT))


def _told(entry: _Entry) -> EngineOfProcess:
    row = row_of(entry)
    memory = None if row.state != "ready" else entry.planned_bytes or measured_bytes(entry)
    notebook = os.environ.get("JPY_SESSION_NAME")  # set by Jupyter's servers
    return EngineOfProcess(os.getpid(), notebook, row.model, row.scheme, row.device, row.state, memory)


def _terminate_all(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    entries = _registry.entries()
    for entry in entries:
        if entry.core is not None:
            entry.core.begin_terminate()
    for entry in entries:
        if time.monotonic() < deadline:
            _registry.remove([entry])


def _forget() -> None:
    # The forked child has none of the engine threads. The old entries are kept from being freed: what their destructors
    # would release belongs to the parent.
    global _registry, _inherited
    _inherited = _registry
    _registry = _Registry()


_inherited: _Registry | None = globals().get("_inherited")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
set_core_provider(lambda *request: _registry.acquire(*request))
