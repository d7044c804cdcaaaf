from __future__ import annotations

from typing import Any

import pytest

from mlc_nb.errors import BadRequestError
from mlc_nb.protocol.engine_config import EngineConfig, resolve_engine_config


def test_the_mode_decides_what_the_configuration_leaves_open() -> None:
    assert [resolve_engine_config(None, mode=mode).num_sequences for mode in ("local", "interactive", "server")] == [
        4,
        1,
        32,
    ]
    assert resolve_engine_config({"max_num_sequence": 7}, mode="interactive").num_sequences == 7
    assert resolve_engine_config({"prefill_chunk_size": 100}).prefill_chunk == 100
    assert resolve_engine_config(None).prefill_chunk == 2048


def test_arguments_and_configuration_must_agree() -> None:
    assert resolve_engine_config(EngineConfig(mode="server")).mode == "server"
    assert resolve_engine_config({"model": "m"}, model="m").model == "m"
    assert resolve_engine_config({"model": "m"}).model == "m"
    for name, config in {"model": {"model": "a"}, "model_lib": {"model_lib": "a"}}.items():
        with pytest.raises(BadRequestError, match=f"engine_config.{name} is 'a'"):
            resolve_engine_config(config, **{name: "b"})  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match=r"engine_config\.mode is 'local'"):
        resolve_engine_config({"mode": "local"}, mode="server")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("additional_models", ["m"]),
        ("tensor_parallel_shards", 2),
        ("pipeline_parallel_stages", 2),
        ("opt", "O3"),
        ("gpu_memory_utilization", 0.5),
        ("kv_cache_page_size", 32),
        ("sliding_window_size", 100),
        ("attention_sink_size", 4),
        ("max_history_size", 1),
        ("kv_state_kind", "rnn_state"),
        ("speculative_mode", "eagle"),
        ("spec_draft_length", 3),
        ("spec_tree_width", 2),
        ("prefix_cache_mode", "tree"),
        ("prefix_cache_max_num_recycling_seqs", -2),
        ("max_num_sequence", 0),
        ("max_num_sequence", "4"),
        ("activation_dtype", "float64"),
        ("num_threads", 0),
        ("num_threads", True),
        ("max_single_sequence_length", 1),
        ("colour", "blue"),
    ],
)
def test_what_is_unknown_invalid_or_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    for make in (lambda: EngineConfig(**{name: value}), lambda: resolve_engine_config({name: value})):
        with pytest.raises(BadRequestError, match=name):
            make()


def test_neutral_values_are_accepted() -> None:
    EngineConfig(tensor_parallel_shards=1, speculative_mode="disable", prefix_cache_mode="disable", verbose=True)
