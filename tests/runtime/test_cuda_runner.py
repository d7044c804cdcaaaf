"""The runner for GPUs on a scripted driver: what reaches the device, what is launched, and that nothing is left behind.

That the kernels compute the right thing is shown on a real GPU (benchmarks/gpu.py).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlc_nb.engine.model import compile_request
from mlc_nb.errors import DeviceUnavailableError, EngineTerminatedError, MLCError, OutOfMemoryError
from mlc_nb.library import LibraryBundle
from mlc_nb.models.llama_cuda import build
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime import cuda_runner
from mlc_nb.runtime.cuda_graphs import MOST_DECODES, bucket_of
from mlc_nb.runtime.cuda_runner import CudaModelRunner
from mlc_nb.runtime.devices import find_cuda_device
from mlc_nb.runtime.prompt_scorer import PromptScorer
from mlc_nb.runtime.sampler import SamplingState
from mlc_nb.runtime.step import SampledToken, SequenceSlice
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.plan import MAX_STEP_TOKENS
from tests.models.tiny_llama import TinyLlama
from tests.runtime.scripted_cuda import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from tests.runtime.scripted_cuda import ScriptedDriver

VOCAB = 50
PAGES = 40


class RecordedProducts:
    """In the place of cuBLAS."""

    def __init__(self, _stream: int, _workspace: int) -> None:
        self.products: list[tuple[Any, int]] = []
        self.closed = False

    def product(self, product: Any, rows: int) -> None:
        self.products.append((product, rows))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(
    scripted: ScriptedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CudaModelRunner]]:
    """Opens the runner of a tiny model in float16; closes it at the end."""
    monkeypatch.setattr(cuda_runner, "Cublas", RecordedProducts)
    runners: list[CudaModelRunner] = []
    file = GGUFFile.open(TinyLlama("F16", vocab=VOCAB).write(tmp_path / "model.gguf"))
    request = compile_request(file, EngineConfig(), "sm_90")
    plan, _, metadata = build(request)
    bundle = LibraryBundle(tmp_path, metadata, request)
    bundle.launch_plan.write_text(plan.model_dump_json())
    bundle.machine_code.write_bytes(b"")

    def open_runner(num_sequences: int = 4, num_pages: int = PAGES) -> CudaModelRunner:
        runners.append(
            CudaModelRunner(
                bundle,
                file.tensors,
                find_cuda_device("cuda"),
                num_pages=num_pages,
                positions=512,
                num_sequences=num_sequences,
                progress=lambda _: None,
            )
        )
        scripted.launches.clear()
        return runners[-1]

    yield open_runner
    for runner in runners:
        runner.close()
    file.close()
    assert (scripted.allocations, scripted.alive) == ({}, [])


def on_device(runner: CudaModelRunner, name: str, count: int, dtype: str = "int32") -> npt.NDArray[Any]:
    address = runner._program.places[name]
    block = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(bytes(block), dtype)


def put(runner: CudaModelRunner, name: str, values: npt.NDArray[Any]) -> None:
    ctypes.memmove(runner._program.places[name], np.ascontiguousarray(values).ctypes.data, values.nbytes)


def grids(scripted: ScriptedDriver, name: str) -> list[tuple[int, int, int]]:
    return [launch.grid for launch in scripted.launches if launch.entry.startswith(name)]


def decodes(positions: Sequence[int], state: SamplingState | None) -> list[SequenceSlice]:
    return [
        SequenceSlice([10 + row], position, list(range(9 * row, 9 * row + position // 16 + 1)), state)
        for row, position in enumerate(positions)
    ]


def test_weights_are_packed_tensor_by_tensor(scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner]) -> None:
    packed: list[str] = []
    real = scripted.cuLaunchKernel
    scripted.cuLaunchKernel = lambda *a: (packed.append(a[0]), real(*a))[1]  # type: ignore[method-assign]
    runner = opened()
    assert len(packed) == 1 + 2 * 7  # the embedding, which is the head too, and two layers
    assert runner.weight_bytes == 2 * (VOCAB * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)) + 4 * 5 * 64


def test_a_step_finds_its_numbers_on_the_device(opened: Callable[..., CudaModelRunner]) -> None:
    runner = opened()
    state = SamplingState(temperature=0)
    part = SequenceSlice(list(range(200)), 40, list(range(15)), state)
    runner.step([*decodes([33, 70], state), part])
    assert on_device(runner, "token_ids", 202).tolist() == [10, 11, *range(200)]
    assert on_device(runner, "positions", 202).tolist() == [33, 70, *range(40, 240)]
    assert on_device(runner, "sequences", 202).tolist() == [0, 1, *[2] * 200]
    assert on_device(runner, "logit_rows", 3).tolist() == [0, 1, 201]
    # The tile with the longer context comes first.
    assert on_device(runner, "tiles", 8).reshape(2, 4).tolist() == [[130, 72, 2, 168], [2, 128, 2, 40]]
    tables = on_device(runner, "page_tables", 3 * 32).reshape(3, 32)
    assert tables[0, :3].tolist() == [0, 1, 2]
    assert tables[1, :5].tolist() == [9, 10, 11, 12, 13]
    assert tables[2, :15].tolist() == list(range(15))


def test_decodes_run_as_one_graph_for_each_rounded_size(
    scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner]
) -> None:
    runner = opened()
    state = SamplingState(temperature=0)
    for positions in ([5, 6, 7], [6, 7, 8], [7, 8, 9, 10], [8]):
        runner.step(decodes(positions, state))
    assert (scripted.captures, len(scripted.graph_launches)) == (2, 4)
    assert len(set(scripted.graph_launches[:3])) == 1
    assert grids(scripted, "embedding") == [(4, 1, 1), (1, 1, 1)]  # only the captures launch anything
    runner.step(decodes([5, 6, 7], state))
    assert on_device(runner, "positions", 4).tolist() == [5, 6, 7, -1]
    choices = on_device(runner, "choices", 4 * 8).reshape(4, 8)
    assert (choices[:, 2] >= 0).tolist() == [True, True, True, False]


def test_steps_that_are_no_plain_decodes_are_launched(
    scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner]
) -> None:
    runner = opened()
    state = SamplingState(temperature=0)
    runner.step([*decodes([5, 6], state), SequenceSlice([1] * 300, 0, list(range(19)), None)])
    assert scripted.captures == 0
    (decode, prefill) = (grids(scripted, name)[0] for name in ("attend_decodes", "attend_prefills"))
    assert (decode[2], prefill[1]) == (2, 3)
    assert {rows for _, rows in runner._cublas.products} == {302}  # type: ignore[union-attr]
    assert grids(scripted, "sample_rows") == [(2, 1, 1)]


def test_sampled_tokens_and_their_log_probabilities_come_back(opened: Callable[..., CudaModelRunner]) -> None:
    runner = opened()
    put(runner, "sampled_ids", np.array([7, 8, -1, 0], np.int32))
    put(runner, "logprobs", np.array([-0.5, -0.25], np.float32))
    put(runner, "top_ids", np.array([[7, 9] + [0] * 18, [8, 1] + [0] * 18], np.int32))
    put(runner, "top_logprobs", np.array([[-0.5, -1] + [0] * 18, [-0.25, -2] + [0] * 18], np.float32))
    told = SamplingState(temperature=0, logprobs=True, top_logprobs=2)
    slices = decodes([5, 6, 7], told)
    slices[1].sampling = SamplingState(temperature=0)
    first, second, third = runner.step(slices)
    assert first == SampledToken(7, -0.5, ((7, -0.5), (9, -1.0)))
    assert second == SampledToken(8)
    assert isinstance(third, MLCError)
    assert "not finite" in str(third)


def test_the_kernel_is_told_what_each_request_asked_for(opened: Callable[..., CudaModelRunner]) -> None:
    runner = opened()
    put(runner, "sampled_ids", np.array([7, 7], np.int32))
    picky = SamplingState(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.5, logit_bias={3: 2.0, 4: -1.0}, seed=1
    )
    twin = np.random.default_rng(1)
    for step in range(2):
        runner.step(decodes([5 + step], picky))
        assert on_device(runner, "uniforms", 1, "float64")[0] == twin.random()
    options = on_device(runner, "options", 6, "float32")
    np.testing.assert_allclose(options, [0.7, 0.9, 0.1, 0.0, 0.5, 1.0], rtol=1e-6)
    top_k, flags, slot, biases, _ = on_device(runner, "choices", 5).tolist()
    assert (top_k, flags, biases) == (5, 2, 2)
    assert on_device(runner, "bias_ids", 2).tolist() == [3, 4]
    assert picky.counts == {7: 2}
    # A sequence whose slot another one took gets its counts back.
    runner._sampler._slots.clear()
    runner._sampler._free_slots = [5]
    assert slot != 5
    runner.step(decodes([7], picky))
    counts = on_device(runner, "counts", 6 * VOCAB).reshape(6, VOCAB)
    assert counts[5, 7] == 2


def test_what_the_kernel_does_not_take_is_sampled_on_the_host(opened: Callable[..., CudaModelRunner]) -> None:
    runner = opened()
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 30] = logits[1, 20] = 5
    put(runner, "logits", logits)
    put(runner, "sampled_ids", np.array([11, 12], np.int32))
    many = SamplingState(temperature=0, logit_bias=dict.fromkeys(range(VOCAB), 0.0) | dict.fromkeys(range(300), 0.0))
    slices = decodes([5, 6], SamplingState(temperature=0))
    many.bias_ids, many.bias = many.bias_ids[:VOCAB].repeat(6), many.bias[:VOCAB].repeat(6)
    slices[0].sampling = many
    assert runner.step(slices) == [SampledToken(30), SampledToken(12)]


def test_a_constraint_that_fails_fails_alone(opened: Callable[..., CudaModelRunner]) -> None:
    class Broken:
        is_finished = False

        def allowed(self) -> npt.NDArray[np.bool_]:
            raise ValueError("no way on")

        def accept(self, token_id: int) -> None:
            raise AssertionError(token_id)

    runner = opened()
    put(runner, "sampled_ids", np.array([11, 12], np.int32))
    slices = decodes([5, 6], SamplingState(temperature=0))
    slices[0].sampling = SamplingState(temperature=0, constraint=Broken())
    broken, other = runner.step(slices)
    assert isinstance(broken, ValueError)
    assert other == SampledToken(12)


def test_a_step_too_large_for_the_buffers_runs_in_parts(
    scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner]
) -> None:
    runner = opened(num_pages=400)
    most = MAX_STEP_TOKENS + 4
    put(runner, "sampled_ids", np.array([9] * 64, np.int32))
    state = SamplingState(temperature=0)
    long = SequenceSlice([1] * (most + 100), 0, list(range(32)), state)
    assert runner.step([*decodes([5], state), long]) == [SampledToken(9), SampledToken(9)]
    assert grids(scripted, "embedding") == [(most, 1, 1), (101, 1, 1)]
    # 64 rows of logits at once: a prompt of 150 tokens is scored in three parts.
    scripted.launches.clear()
    scorer = PromptScorer([1] * 150, 0)
    runner.step([SequenceSlice([1] * 150, 0, list(range(10)), None, scorer)])
    assert grids(scripted, "sample_rows") == [(64, 1, 1), (64, 1, 1), (22, 1, 1)]
    assert scorer.is_complete
    assert runner.logits_all([SequenceSlice([1] * 70, 0, list(range(5)), None)]).shape == (70, VOCAB)


def test_a_resized_pool_is_where_kernels_look(scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner]) -> None:
    runner = opened()
    state = SamplingState(temperature=0)
    runner.step(decodes([5], state))
    before = runner.memory()
    runner.resize_kv_cache(2 * PAGES)
    runner.step(decodes([5], state))
    assert (scripted.captures, runner.num_pages) == (2, 2 * PAGES)
    assert runner.memory().kv_cache == 2 * before.kv_cache
    attend = [launch for launch in scripted.launches if launch.entry.startswith("attend_decodes")][-1]
    cells = (ctypes.c_void_p * 12).from_address(attend.arguments)
    assert ctypes.c_void_p.from_address(cells[4] or 0).value == runner._program.places["pages"]
    assert ctypes.c_int32.from_address(cells[10] or 0).value == 2 * PAGES
    scripted.memory = 0
    with pytest.raises(OutOfMemoryError):
        runner.resize_kv_cache(PAGES)
    assert runner.num_pages == 2 * PAGES


def test_too_little_memory_is_found_before_any_is_taken(
    scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner]
) -> None:
    scripted.memory = 200 * 2**20
    scripted.fails["cuMemAlloc"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(
        OutOfMemoryError, match=r"needs [\d,]+ MiB of the memory of Scripted GPU \(cuda:0\), of which 200"
    ):
        opened()


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData", "cuMemcpyHtoD", "cuLaunchKernel"])
def test_an_opening_that_fails_leaves_nothing(
    scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner], call: str
) -> None:
    scripted.fails[call] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceUnavailableError, match="the scripted error 700"):
        opened()
    assert (scripted.allocations, scripted.alive) == ({}, [])


def test_an_error_of_the_device_is_one_of_ours(
    scripted: ScriptedDriver, opened: Callable[..., CudaModelRunner]
) -> None:
    runner = opened()
    scripted.fails["cuStreamSynchronize"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceUnavailableError, match=r"CUDA failed while waiting for a step: .*Make a new engine"):
        runner.step(decodes([5], SamplingState(temperature=0)))
    runner.close()
    with pytest.raises(EngineTerminatedError):
        runner.step(decodes([5], SamplingState(temperature=0)))
    assert runner.memory().total == 0


def test_buckets_cover_every_batch_and_waste_little() -> None:
    for batch in range(1, MOST_DECODES + 1):
        assert batch <= bucket_of(batch) < max(2 * batch, batch + 8) + 25
    assert [bucket_of(batch) for batch in (1, 2, 3, 9, 33, 64, 65)] == [1, 2, 4, 16, 40, 64, 96]
    assert bucket_of(MOST_DECODES + 1) == 0
