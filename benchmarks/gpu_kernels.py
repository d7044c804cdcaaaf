"""Checks and times the GPU kernels on the shapes of three models; run on the machine with the GPU.

python -m benchmarks.gpu_kernels --out $OUT/gpu_kernels.json
python -m benchmarks.gpu_kernels --only checks --filter attend

It needs torch, cuda-bindings and NVRTC. Times are medians of replays of a CUDA graph that goes round inputs larger than
the L2 cache; shares are of the bandwidth of a device-to-device copy in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_device import Device, compile_kernels, time_calls
from benchmarks.gpu_kernel_checks import Check, all_checks
from benchmarks.gpu_steps import MODELS, ModelSizes, StepBench, random_arrays, sampling_arguments
from mlc_nb.compiler.kernels.cuda.attention import PREFILL_TILE_ROWS, attend_decodes, attend_prefills, softmax_scale
from mlc_nb.compiler.kernels.cuda.product import Epilogue, skinny_product
from mlc_nb.compiler.kernels.cuda.sampling import sample_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel

__all__ = ["main"]

# Inputs that a timing goes round; the L2 cache has 60 MB.
_ROTATED_BYTES = 300_000_000
_MOST_COPIES = 64


@dataclass
class Timing:
    """A named measurement: its kernels, and what runs it and gives the row of the table."""

    name: str
    kernels: list[CudaKernel]
    run: Callable[[Device, float], dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kernels")
    parser.add_argument("--architecture", default="sm_90")
    parser.add_argument("--only", choices=("checks", "times", "steps"), action="append")
    parser.add_argument("--filter", default="", help="only what has this in its name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    wanted = options.only or ["checks", "times", "steps"]

    checks = [c for c in all_checks() if options.filter in c.name] if "checks" in wanted else []
    timings = [t for t in all_timings() if options.filter in t.name] if "times" in wanted else []
    timings += [t for t in all_steps() if options.filter in t.name] if "steps" in wanted else []
    kernels = [kernel for check in checks for kernel in check.kernels]
    kernels += [kernel for timing in timings for kernel in timing.kernels]
    start = time.perf_counter()
    cubins = compile_kernels(kernels, options.architecture)
    print(f"compiled {len(cubins)} kernels in {time.perf_counter() - start:.1f} s", flush=True)
    device = Device(cubins)
    rows: list[dict[str, Any]] = []
    failed = [check.name for check in checks if not passes(device, check, rows)]
    print(
        f"{len(checks) - len(failed)} of {len(checks)} checks passed, {time.perf_counter() - start:.0f} s", flush=True
    )
    bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for timing in timings:
        row = {"name": timing.name, **timing.run(device, bandwidth)}
        rows.append(row)
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        device.torch.cuda.empty_cache()
    if options.out:
        result = {"device": device.torch.cuda.get_device_name(), "copy_bandwidth": bandwidth, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"total {time.perf_counter() - start:.0f} s; failed: {failed or 'nothing'}")
    return 1 if failed else 0


def passes(device: Device, check: Check, rows: list[dict[str, Any]]) -> bool:
    """Run a check; an exception is a failure, and the rest goes on where the device still works."""
    try:
        error, limit = check.run(device)
    except Exception:
        traceback.print_exc()
        error, limit = float("nan"), 0.0
    passed = error <= limit
    rows.append({"name": check.name, "error": error, "limit": limit, "passed": passed})
    if not passed:
        print(f"FAILED {check.name}: error {error:.2e}, limit {limit:.0e}", flush=True)
    return passed


def copy_bandwidth(device: Device) -> float:
    """Bytes read and written in a second by a copy of 4 GB: the best of ten, as it is a ceiling."""
    torch = device.torch
    source = torch.empty(2**29, device="cuda", dtype=torch.float64).normal_()
    target = torch.empty_like(source)
    size: int = source.numel() * source.element_size()
    fastest = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        fastest = min(fastest, start.elapsed_time(end) / 1e3)
    return 2 * size / fastest


def all_timings() -> list[Timing]:
    """Times of single kernels."""
    timings = []
    for sizes in MODELS.values():
        big = sizes.layers == 32
        for block_type in ("F16", "q4f16_1", "Q8_0", "Q4_1") if big else ("F16", "q4f16_1"):
            for tokens in (1, 8, 16, 32, 64) if big and block_type in ("F16", "q4f16_1") else (1, 8):
                timings += [
                    time_product(sizes, block_type, name, tokens) for name in ("qkv", "o", "gate_up", "down", "head")
                ]
        if big:
            timings += [time_library_product(sizes, name, tokens) for tokens in (16, 64) for name in ("o", "gate_up")]
        timings += [time_decode_attention(sizes, *case) for case in ((1, 512, 16), (1, 8192, 32), (64, 512, 1))]
        timings.append(time_prefill_attention(sizes, 2048))
        timings += [
            time_sampling(sizes, rows, *case) for rows in (1, 64) for case in ((0.0, 1.0), (0.7, 1.0), (0.7, 0.95))
        ]
    return timings


def time_product(sizes: ModelSizes, block_type: str, name: str, tokens: int) -> Timing:
    matrix = sizes.matrices(block_type)[name]
    # The rotating epilogue is timed inside whole steps.
    epilogue = {"gate_up": Epilogue.GATED_SILU, "head": Epilogue.STORE_FLOAT32}.get(name, Epilogue.ADD_TO_STREAM)
    kernel = skinny_product(matrix, epilogue, tokens)

    def run(device: Device, bandwidth: float) -> dict[str, Any]:
        torch = device.torch
        size = sum(matrix.array_bytes.values())
        copies = min(_MOST_COPIES, _ROTATED_BYTES // size + 2)
        x = torch.randn(tokens, matrix.columns, device="cuda", dtype=torch.float16)
        out = torch.zeros(tokens, matrix.rows, device="cuda")
        scalars = {"tokens": tokens, "page_table_width": 0, "num_pages": 0, "layer": 0}
        made = [random_arrays(torch, matrix) for _ in range(copies)]
        calls = [device.bind(kernel, {**arrays, "activations": x, "out": out, **scalars}) for arrays in made]
        seconds = time_calls(torch, calls) / copies
        return {"us": seconds * 1e6, "share": size / seconds / bandwidth}

    return Timing(f"{sizes.name} {name} {block_type} {tokens} tokens", [kernel], run)


def time_library_product(sizes: ModelSizes, name: str, tokens: int) -> Timing:
    matrix = sizes.matrices("F16")[name]

    def run(device: Device, bandwidth: float) -> dict[str, Any]:
        torch = device.torch
        size = matrix.array_bytes["values"]
        copies = _ROTATED_BYTES // size + 2
        x = torch.randn(tokens, matrix.columns, device="cuda", dtype=torch.float16)
        out = torch.zeros(tokens, matrix.rows, device="cuda", dtype=torch.float16)
        weights = [random_arrays(torch, matrix)["values"] for _ in range(copies)]
        calls = [lambda weight=weight: torch.mm(x, weight.T, out=out) for weight in weights]
        seconds = time_calls(torch, calls) / copies
        return {"us": seconds * 1e6, "share": size / seconds / bandwidth}

    return Timing(f"{sizes.name} {name} cuBLAS {tokens} tokens", [], run)


def time_decode_attention(sizes: ModelSizes, batch: int, context: int, splits: int) -> Timing:
    shape = sizes.attention
    kernel = attend_decodes(shape)

    def run(device: Device, bandwidth: float) -> dict[str, Any]:
        torch = device.torch
        width = -(-context // 16)
        num_pages, layers = batch * width, sizes.layers
        pages = torch.randn(shape.pages_shape(layers, num_pages), device="cuda", dtype=torch.float16)
        queries = torch.randn(batch, shape.query_heads * shape.head_dim, device="cuda", dtype=torch.float16)
        whole = {"device": "cuda", "dtype": torch.int32}
        arguments = {
            "queries": queries,
            "positions": torch.full((batch,), context - 1, **whole),
            "sequences": torch.arange(batch, **whole),
            "page_tables": torch.randperm(num_pages, device="cuda").int(),
            "pages": pages,
            "partials": torch.zeros(shape.partials_elements(batch, splits), device="cuda"),
            "arrivals": torch.zeros(shape.arrivals_elements(batch), **whole),
            "out": torch.zeros_like(queries),
            "scale": softmax_scale(shape.head_dim),
            "page_table_width": width,
            "num_pages": num_pages,
        }
        calls = [
            device.bind(kernel, {**arguments, "layer": layer}, splits=splits, batch=batch) for layer in range(layers)
        ]
        seconds = time_calls(torch, calls) / layers
        return {"us": seconds * 1e6, "share": sizes.kv_bytes(batch, context) / layers / seconds / bandwidth}

    return Timing(f"{sizes.name} decode attention batch {batch} context {context}", [kernel], run)


def time_prefill_attention(sizes: ModelSizes, tokens: int) -> Timing:
    shape = sizes.attention
    kernel = attend_prefills(shape)

    def run(device: Device, bandwidth: float) -> dict[str, Any]:
        assert bandwidth > 0
        torch = device.torch
        width = -(-tokens // 16)
        pages = torch.randn(shape.pages_shape(sizes.layers, width), device="cuda", dtype=torch.float16)
        queries = torch.randn(tokens, shape.query_heads * shape.head_dim, device="cuda", dtype=torch.float16)
        starts = range(0, tokens, PREFILL_TILE_ROWS)
        tiles = [[start, min(PREFILL_TILE_ROWS, tokens - start), 0, start] for start in starts][::-1]
        arguments = {
            "queries": queries,
            "tiles": torch.tensor(tiles, device="cuda", dtype=torch.int32),
            "page_tables": torch.randperm(width, device="cuda").int(),
            "pages": pages,
            "out": torch.zeros_like(queries),
            "scale": softmax_scale(shape.head_dim),
            "page_table_width": width,
            "num_pages": width,
        }
        calls = [device.bind(kernel, {**arguments, "layer": i}, tiles=len(tiles)) for i in range(sizes.layers)]
        seconds = time_calls(torch, calls) / sizes.layers
        operations = 4 * tokens * (tokens + 1) / 2 * shape.query_heads * shape.head_dim
        return {"us": seconds * 1e6, "tflops": operations / seconds / 1e12}

    return Timing(f"{sizes.name} prefill attention {tokens} tokens", [kernel], run)


def time_sampling(sizes: ModelSizes, rows: int, temperature: float, top_p: float) -> Timing:
    kernel = sample_rows(sizes.vocab)

    def run(device: Device, bandwidth: float) -> dict[str, Any]:
        torch = device.torch
        logits = torch.randn(rows, sizes.vocab, device="cuda") * 4
        call = device.bind(kernel, sampling_arguments(torch, logits, temperature, top_p), rows=rows)
        seconds = time_calls(torch, [call] * 10) / 10
        return {"us": seconds * 1e6, "share": 4 * logits.numel() / seconds / bandwidth}

    return Timing(f"{sizes.name} sampling {rows} rows temperature {temperature} top_p {top_p}", [kernel], run)


def all_steps() -> list[Timing]:
    """Times of whole steps."""
    big, small, smallest = MODELS.values()
    return [
        *(time_step(big, kind, batch, 512) for kind in ("F16", "q4f16_1") for batch in (1, 8, 16, 32, 64)),
        time_step(big, "Q8_0", 1, 512),
        time_step(small, "F16", 1, 512),
        time_step(smallest, "F16", 1, 512),
        time_prefill(big, "F16", 2048),
        time_prefill(big, "F16", 1000),
        time_prefill(big, "q4f16_1", 2048),
    ]


def time_step(sizes: ModelSizes, block_type: str, batch: int, context: int) -> Timing:
    bench = StepBench(sizes, block_type, batch, context)

    def run(device: Device, bandwidth: float) -> dict[str, Any]:
        bench.allocate(device)
        splits = max(1, min(context // 64, -(-264 // (batch * sizes.kv_heads))))
        row: dict[str, Any] = {}
        floor = (sizes.weight_bytes(block_type) + sizes.kv_bytes(batch, context)) / bandwidth
        for overlaps in (False, True):
            device.overlaps = overlaps
            seconds = bench.time_decode(splits)
            suffix = "_overlapped" if overlaps else ""
            row |= {f"ms{suffix}": seconds * 1e3, f"tokens_per_s{suffix}": batch / seconds}
        device.overlaps = False
        bench.release()
        row["share"] = floor * 1e3 / min(row["ms"], row["ms_overlapped"])
        return row

    return Timing(f"{sizes.name} decode step {block_type} batch {batch}", bench.kernels, run)


def time_prefill(sizes: ModelSizes, block_type: str, tokens: int) -> Timing:
    bench = StepBench(sizes, block_type, 1, 512, tokens)

    def run(device: Device, bandwidth: float) -> dict[str, Any]:
        assert bandwidth > 0
        bench.allocate(device)
        seconds = bench.time_prefill()
        bench.release()
        return {"ms": seconds * 1e3, "tokens_per_s": tokens / seconds}

    return Timing(f"{sizes.name} prefill step {block_type} {tokens} tokens", bench.kernels, run)


def _short(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    sys.exit(main())
