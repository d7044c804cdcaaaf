"""Launch plans for GPUs: machine code without a GPU, tensors that all find their place, models that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlc_nb.compiler.cuda_pipeline import build_cuda_library
from mlc_nb.engine.model import compile_request
from mlc_nb.errors import BadRequestError, CompileError, ModelFormatError
from mlc_nb.library import open_bundle
from mlc_nb.models.llama_cuda import build
from mlc_nb.models.registry import architecture_module
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.launch_plan import Launch, LaunchPlan, Product, compile_size
from tests.models.tiny_llama import TinyLlama

if TYPE_CHECKING:
    from pathlib import Path

    from mlc_nb.weights.plan import CompileRequest

AS_THE_DEFAULT_MODEL = TinyLlama("Q4_1", types={"token_embd": "Q8_0"}, vocab=48)
HEAD_AND_EMBEDDING = TinyLlama("F16", tied=False, rope_factors=True, heads=6, kv_heads=2, head_dim=32, hidden=96)
MIXED_ATTENTION = TinyLlama("Q4_0", types={"attn_v": "Q8_0"})


def request_of(
    model: TinyLlama, folder: Path, isa: str = "sm_90", config: EngineConfig | None = None
) -> CompileRequest:
    with GGUFFile.open(model.write(folder / "model.gguf")) as file:
        return compile_request(file, config or EngineConfig(), isa)


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        (AS_THE_DEFAULT_MODEL, "sm_75"),
        (AS_THE_DEFAULT_MODEL, "sm_80"),
        (AS_THE_DEFAULT_MODEL, "sm_89"),
        (AS_THE_DEFAULT_MODEL, "sm_90"),
        (HEAD_AND_EMBEDDING, "sm_75"),
        (TinyLlama("BF16"), "sm_80"),
        (MIXED_ATTENTION, "sm_90"),
    ],
)
def test_every_kernel_of_a_plan_is_in_the_machine_code(tmp_path: Path, model: TinyLlama, architecture: str) -> None:
    plan, kernels, _ = build(request_of(model, tmp_path, architecture))
    build_cuda_library(plan, kernels, architecture, tmp_path / "model.cubin", tmp_path / "plan.json")
    code = (tmp_path / "model.cubin").read_bytes()
    assert plan == LaunchPlan.model_validate_json((tmp_path / "plan.json").read_bytes())
    for name, kernel in plan.kernels.items():
        assert kernel.entry.encode() in code, name


def test_a_bundle_for_a_gpu_is_compiled_in_a_child_process_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLC_NB_HOME", str(tmp_path / "cache"))
    request = request_of(TinyLlama("F16"), tmp_path)
    bundle = open_bundle(request, progress=False)
    made = bundle.machine_code.stat().st_mtime_ns
    assert bundle.metadata.for_cuda
    assert open_bundle(request, progress=False).machine_code.stat().st_mtime_ns == made
    bundle.machine_code.write_bytes(b"damaged")
    assert open_bundle(request, progress=False).machine_code.stat().st_size > 100_000


@pytest.mark.parametrize("model", [AS_THE_DEFAULT_MODEL, HEAD_AND_EMBEDDING, MIXED_ATTENTION])
def test_all_rows_of_all_tensors_find_a_place(tmp_path: Path, model: TinyLlama) -> None:
    request = request_of(model, tmp_path)
    plan, _, metadata = build(request)
    placed = {packing.tensor for packing in plan.packing} | {vector.tensor for vector in metadata.vectors}
    assert placed == set(request.tensors) - {"rope_freqs.weight"}
    filled: dict[int, list[tuple[int, int]]] = {}
    for packing in plan.packing:
        rows = request.tensors[packing.tensor][1][0]
        (values,) = {a.value for a in packing.launch.arguments if a.kind == "parameter"} & {
            m.parameters["values"] for m in metadata.matrices
        }
        filled.setdefault(int(values), []).append((packing.first_row, rows))
    for parts in filled.values():
        ends = [first + rows for first, rows in parts]
        assert [first for first, _ in parts] == [0, *ends[:-1]]
    assert metadata.rope.factors == ("rope_freqs.weight" if model.rope_factors else None)


@pytest.mark.parametrize("model", [AS_THE_DEFAULT_MODEL, HEAD_AND_EMBEDDING, MIXED_ATTENTION])
def test_launches_name_only_what_a_plan_or_the_runtime_places(tmp_path: Path, model: TinyLlama) -> None:
    plan, _, _ = build(request_of(model, tmp_path))
    of_the_runtime = {
        *("token_ids", "positions", "sequences", "logit_rows", "tiles", "page_tables", "pages", "cosines", "sines"),
        *("uniforms", "options", "choices", "bias_ids", "bias_values", "masks", "counts", "adjusted_logits", "source"),
        *("sampled_ids", "logprobs", "top_ids", "top_logprobs"),
    }
    known = {buffer.name for buffer in plan.buffers} | of_the_runtime
    steps = [step for queue in (*plan.bodies, *plan.heads) for step in queue.steps]
    launches = [*(step for step in steps if isinstance(step, Launch)), plan.sampling]
    arguments = [argument for launch in launches for argument in launch.arguments]
    arguments += [a for step in steps if isinstance(step, Product) for a in (step.weight, step.inputs, step.output)]
    assert {argument.name for argument in arguments if argument.kind == "buffer"} <= known
    assert {argument.value for argument in arguments if argument.kind == "parameter"} <= set(
        range(len(plan.parameters))
    )
    sizes = {"tokens": 5, "rows": 3, "batch": 2, "splits": 4, "tiles": 1}
    for launch in launches:
        assert all(compile_size(extent)(sizes) > 0 for extent in plan.kernels[launch.kernel].grid)


def test_what_only_a_cpu_can_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_gate\.weight, blk\.0\.ffn_up\.weight.*device 'cpu'"):
        build(request_of(TinyLlama("Q4_0", types={"ffn_up": "Q8_0"}), tmp_path))
    with pytest.raises(ModelFormatError, match=r"heads of 24 dimensions.*multiple of 16"):
        build(request_of(TinyLlama("F16", head_dim=24), tmp_path))
    with pytest.raises(ModelFormatError, match=r"quantized weights need activations in float16 on a GPU, not bfloat16"):
        build(request_of(TinyLlama("Q4_0"), tmp_path, config=EngineConfig(activation_dtype="bfloat16")))
    with pytest.raises(ModelFormatError, match="can run on a GPU: llama"):
        architecture_module("mamba", for_cuda=True)


def test_types_of_activations_belong_to_devices(tmp_path: Path) -> None:
    assert request_of(TinyLlama("BF16"), tmp_path).activation_dtype == "bfloat16"
    assert request_of(TinyLlama("BF16"), tmp_path, "sm_75").activation_dtype == "float16"
    assert request_of(TinyLlama("F16"), tmp_path).activation_dtype == "float16"
    with pytest.raises(BadRequestError, match="'int8', which a GPU does not have; use 'auto' or one of 'float16'"):
        request_of(TinyLlama("F16"), tmp_path, config=EngineConfig(activation_dtype="int8"))
    with pytest.raises(BadRequestError, match="'float16', which a CPU does not have"):
        request_of(TinyLlama("F16"), tmp_path, "avx2", EngineConfig(activation_dtype="float16"))


def test_bfloat16_needs_a_newer_gpu(tmp_path: Path) -> None:
    request = request_of(TinyLlama("F16"), tmp_path, "sm_75", EngineConfig(activation_dtype="bfloat16"))
    plan, kernels, _ = build(request)
    with pytest.raises(CompileError, match=r"needs compute capability 8\.0, and this GPU is sm_75.*float16"):
        build_cuda_library(plan, kernels, "sm_75", tmp_path / "model.cubin", tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["__import__('os')", "tokens ** 2", "tokens / 2", "f(1)", "1.5", "tokens;", "a.b", ""])
def test_sizes_are_arithmetic_and_nothing_else(text: str) -> None:
    with pytest.raises(ModelFormatError, match="is no size"):
        compile_size(text)
