from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mlc_nb.engine import provider
from mlc_nb.engine.core import EngineCore
from mlc_nb.protocol.engine_config import EngineConfig, resolve_engine_config
from tests.engine.scripted import NextToken, ScriptedRunner, make_model, mixed

MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core() -> Iterator[MakeCore]:
    """Make cores on the scripted model; they are terminated after the test."""
    cores: list[EngineCore] = []

    def make(next_token: NextToken = mixed, config: dict[str, object] | None = None, **model: object) -> EngineCore:
        cores.append(EngineCore(make_model(next_token, **model), resolve_engine_config(config)))
        return cores[-1]

    yield make
    for core in cores:
        core.terminate()
        assert not core._thread.is_alive()


@pytest.fixture
def serve(make_core: MakeCore) -> Iterator[Callable[..., None]]:
    """Let engines that are made from now on run the scripted model with the given script."""
    previous = provider.set_core_provider(provider.create_core)

    def serve_script(
        next_token: NextToken = mixed, *, runners: list[ScriptedRunner] | None = None, **model: object
    ) -> None:
        def provide(name: str, device: str, model_lib: str | None, config: EngineConfig) -> EngineCore:
            del name, device, model_lib
            return make_core(
                next_token, config.model_dump(exclude_unset=True, exclude={"model"}), runners=runners, **model
            )

        provider.set_core_provider(provide)

    yield serve_script
    provider.set_core_provider(previous)
