"""How long sequences may be: the rules of the modes on machines of any size, and the memory that is free."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlc_nb.engine.engine import MLCEngine
from mlc_nb.engine.limits import Limits, resolve_limits, resolved_config
from mlc_nb.errors import BadRequestError, OutOfMemoryError
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.memory import MemoryNeeds, MemoryRow
from mlc_nb.weights.plan import LibraryMetadata, PackedWeight, RopeTable

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
WORKSPACE = 128 * MIB
LOGITS = 2 * MIB
FIXED = 16 * MIB + WORKSPACE + LOGITS
ADDRESSABLE = (2**31 - 1) // (16 * 2 * 4 * 16 * 64) * 16


def metadata(context: int, *, kv_dtype: str = "float16", rows: int = 4096) -> LibraryMetadata:
    """A model whose weights are ``rows`` x 1024 float32 and whose tokens need 16 or 32 KiB in the KV cache."""
    return LibraryMetadata(
        format_version=1,
        architecture="llama",
        isa="avx2",
        activation_dtype="int8",
        vocab_size=1000,
        padded_vocab_size=1008,
        context_window_size=context,
        hidden_size=1024,
        layers=16,
        query_heads=16,
        kv_heads=4,
        head_dim=64,
        kv_dtype=kv_dtype,
        page_size=16,
        chunk_pages=16,
        rope=RopeTable(dim=64, base=1e4, scale=1.0, factors=None),
        vectors=(),
        matrices=(PackedWeight(parameters={}, block_type="F32", rows=rows, columns=1024, sources=()),),
    )


def free_for(tokens: int, *, token_bytes: int = 16384) -> int:
    """Free memory in which the model's KV cache holds so many tokens, and no more."""
    return -(-(tokens * token_bytes + FIXED) * 100 // 85) + 2


class FreeRoom:
    """A device with so much free memory, and perhaps a limit and idle engines that can go."""

    def __init__(self, free: int, *, most: int | None = None, idle: int = 0) -> None:
        self.free, self.most, self.idle = free, most, idle
        self.taken = 0

    def free_bytes(self) -> int:
        return self.free

    def most_bytes(self) -> int | None:
        return self.most

    def make(self, missing: int) -> bool:
        if missing > self.idle:
            return False
        self.free += self.idle
        self.idle = 0
        return True

    def take(self, size: int) -> None:
        self.taken += size

    def others(self) -> list[MemoryRow]:
        return [MemoryRow("other", 50 * MIB)]


def resolve(model: LibraryMetadata, config: EngineConfig, free: int, **room: Any) -> Limits:
    needs = MemoryNeeds(
        weights=16 * MIB, kv_token=16384 if model.kv_dtype == "float16" else 32768, workspace=WORKSPACE, logits=LOGITS
    )
    return resolve_limits(model, config, needs, FreeRoom(free, **room))


@pytest.mark.parametrize(
    ("config", "context", "capacity", "single", "total"),
    [
        ({}, 4096, 100_000, 4096, 4096),
        ({}, 32768, 100_000, 8192, 8192),
        ({}, 32768, 1000, 1000, 1000),
        ({"mode": "local"}, 32768, 100_000, 8192, 8192),
        ({"mode": "interactive"}, 32768, 100_000, 32768, 32768),
        ({"mode": "interactive"}, 32768, 20_000, 20_000, 20_000),
        ({"mode": "server"}, 4096, 1_000_000, 4096, 32 * 4096),
        ({"mode": "server"}, 32768, 1_000_000, 32768, ADDRESSABLE),
        ({"mode": "server", "max_num_sequence": 3}, 4096, 1_000_000, 4096, 3 * 4096),
        ({"mode": "server"}, 4096, 9000, 4096, 9000),
        ({"mode": "server"}, 4096, 3000, 3000, 3000),
        ({"max_single_sequence_length": 512}, 4096, 100_000, 512, 512),
        ({"max_single_sequence_length": 2}, 4096, 100_000, 2, 2),
        ({"max_total_sequence_length": 20_000}, 4096, 100_000, 4096, 20_000),
        ({"max_total_sequence_length": 1000}, 4096, 100_000, 1000, 1000),
        ({"max_total_sequence_length": 1000, "max_single_sequence_length": 1000}, 4096, 1000, 1000, 1000),
        ({}, 8, 16, 8, 8),
    ],
)
def test_rules_of_the_modes(config: dict[str, Any], context: int, capacity: int, single: int, total: int) -> None:
    found = resolve(metadata(context), EngineConfig(**config), free_for(capacity))
    assert (found.single_sequence, found.pages) == (single, -(-total // 16))


def test_float32_pages_hold_half_as_many_tokens() -> None:
    found = resolve(metadata(4096, kv_dtype="float32"), EngineConfig(), free_for(1000))
    assert found.single_sequence == 500


@given(
    context=st.integers(1, 200_000),
    mode=st.sampled_from([None, "local", "interactive", "server"]),
    total=st.none() | st.integers(16, 400_000),
    single=st.none() | st.integers(2, 200_000),
    sequences=st.none() | st.integers(1, 256),
    free=st.integers(0, 2**36),
)
def test_limits_are_always_sound(
    context: int, mode: Any, total: int | None, single: int | None, sequences: int | None, free: int
) -> None:
    config = EngineConfig(
        mode=mode, max_total_sequence_length=total, max_single_sequence_length=single, max_num_sequence=sequences
    )
    in_memory = max(0, int(free * 0.85) - FIXED) // 16384
    capacity = min(in_memory, ADDRESSABLE)
    try:
        found = resolve(metadata(context), config, free)
    except (OutOfMemoryError, BadRequestError) as error:
        refusal: Exception | None = error
    else:
        refusal = None
    if isinstance(refusal, OutOfMemoryError):
        assert in_memory < (total or 16)
    elif refusal is not None and single is not None and single > context:
        assert "context window" in str(refusal)
    elif refusal is not None and total is not None and total > ADDRESSABLE:
        assert f"holds at most {ADDRESSABLE} tokens" in str(refusal)
    elif refusal is not None:
        by_mode = 8192 if mode in (None, "local") else capacity
        assert single is not None
        assert single > min(context, total or min(capacity, by_mode))
    if refusal is not None:
        return
    assert capacity >= (total or 16)
    assert found.pages * 16 <= ADDRESSABLE
    assert 1 <= found.single_sequence <= context
    assert found.single_sequence <= found.pages * 16 <= capacity + 16
    if single is not None:
        assert found.single_sequence == single
    if total is not None:
        assert found.pages == -(-total // 16)


@pytest.mark.parametrize(
    ("config", "capacity", "message"),
    [
        ({"max_single_sequence_length": 5000}, 10**6, "is 5000, but the model's context window is 4096 tokens"),
        (
            {"max_single_sequence_length": 2000, "max_total_sequence_length": 1000},
            10**6,
            "holds 1000 tokens, as many as engine_config.max_total_sequence_length says; raise it",
        ),
        ({"max_single_sequence_length": 2000}, 1500, "holds 1500 tokens, as many as fit in the free memory; free some"),
    ],
)
def test_refused_lengths_say_which_rule_bound_them(config: dict[str, Any], capacity: int, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        resolve(metadata(4096), EngineConfig(**config), free_for(capacity))


def test_the_local_mode_says_that_it_bound_a_length() -> None:
    with pytest.raises(BadRequestError, match="holds 8192 tokens, as many as mode 'local' gives"):
        resolve(metadata(32768), EngineConfig(max_single_sequence_length=10_000), free_for(10**6))


def test_the_pool_has_fewer_elements_than_kernels_can_address() -> None:
    found = resolve(metadata(32768), EngineConfig(mode="server"), free_for(10**6))
    assert found.total == ADDRESSABLE == 262_128
    rule = "kernels address the KV pool with 32 bits: at most 262128 tokens"
    assert found.rules["max_total_sequence_length"] == rule
    assert found.rules["max_single_sequence_length"] == "the model's context window"
    with pytest.raises(BadRequestError, match=r"max_total_sequence_length is 262129, .* at most 262128 tokens"):
        resolve(metadata(32768), EngineConfig(max_total_sequence_length=262_129), free_for(10**6))


@pytest.mark.parametrize("config", [{}, {"max_single_sequence_length": 2}])
def test_the_pool_has_a_page_however_short_the_sequences_are(config: dict[str, Any]) -> None:
    found = resolve(metadata(8), EngineConfig(**config), free_for(1000))
    assert (found.total, found.pages) == (16, 1)
    resolved = resolved_config(EngineConfig(**config), found, activation_dtype="int8", num_threads=1)
    assert resolved.max_single_sequence_length == found.single_sequence == config.get("max_single_sequence_length", 8)


def test_too_little_memory_blames_no_setting_that_was_not_given() -> None:
    with pytest.raises(OutOfMemoryError) as refusal:
        resolve(metadata(4096), EngineConfig(), 100 * MIB)
    assert "engine_config" not in str(refusal.value)


def test_too_little_memory_names_all_sizes_and_what_would_fit() -> None:
    with pytest.raises(OutOfMemoryError) as refusal:
        resolve(metadata(4096), EngineConfig(max_total_sequence_length=4000), 200 * MIB)
    text = str(refusal.value)
    rows = {"weights": 16.0, "workspace": 128.0, "logits": 2.0, "KV cache": 62.5, "together": 208.5, "free": 200.0}
    for purpose, size in rows.items():
        assert re.search(rf"^  {purpose} +{size} MiB", text, re.MULTILINE), text
    fitting = int(re.search(r"max_total_sequence_length of at most ([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]
    assert resolve(metadata(4096), EngineConfig(max_total_sequence_length=fitting), 200 * MIB).total == fitting
    with pytest.raises(OutOfMemoryError):
        resolve(metadata(4096), EngineConfig(max_total_sequence_length=fitting + 1), 200 * MIB)
    assert "unloading other, which holds 50.0 MiB" in text
    more = float(re.search(r"another ([\d.]+) MiB of free memory", text)[1])  # type: ignore[index]
    assert resolve(metadata(4096), EngineConfig(max_total_sequence_length=4000), int((200 + more + 0.1) * MIB))
    assert "memory_limit" not in text


def test_weights_that_do_not_fit_are_named_as_what_is_too_large() -> None:
    with pytest.raises(OutOfMemoryError, match="a smaller model, or this one stored in fewer bits"):
        resolve(metadata(4096), EngineConfig(), 100 * MIB)


def test_a_memory_limit_binds_like_memory_itself() -> None:
    found = resolve(metadata(4096), EngineConfig(), free_for(100_000), most=FIXED + 1000 * 16384)
    assert found.total == 1000
    assert "(memory_limit)" in found.rules["max_total_sequence_length"]
    with pytest.raises(OutOfMemoryError, match=r"left by memory_limit +100\.0 MiB(.|\n)*a higher memory_limit"):
        resolve(metadata(4096), EngineConfig(), free_for(100_000), most=100 * MIB)


def test_idle_engines_go_for_a_whole_sequence_only_if_that_is_enough() -> None:
    found = resolve(metadata(4096), EngineConfig(), free_for(1000), idle=free_for(4096))
    assert found.total == 4096
    found = resolve(metadata(4096), EngineConfig(), free_for(1000), idle=MIB)
    assert found.total == 1000
    found = resolve(metadata(4096), EngineConfig(), 0, idle=free_for(1000))
    assert found.total == 1000
    with pytest.raises(OutOfMemoryError):
        resolve(metadata(4096), EngineConfig(), 0, idle=MIB)


def test_the_server_mode_of_the_default_model_answers(smollm2_path: Path) -> None:
    with MLCEngine(smollm2_path, mode="server") as engine:
        assert engine.config.max_total_sequence_length is not None
        assert engine.config.max_total_sequence_length <= 186_400  # 30 layers, 3 KV heads of 64
        answer = engine.completions.create(prompt="Once upon a time", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
