"""llama.cpp's half of ``benchmarks.versus``: the same work through llama-cpp-python's C API, printed as a line of JSON.

Runs in the peers' venv, which has llama-cpp-python and numpy and nothing of ours.

python llama_worker.py MODEL.gguf THREADS KIND...
python llama_worker.py MODEL.gguf 0 requantize Q4_0.gguf
python llama_worker.py MODEL.gguf THREADS logits IDS.json LOGITS.npy
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import llama_cpp as ll  # noqa: E402 - importing it is part of the start-up that is measured
import numpy as np  # noqa: E402

CONTEXT = 8192
MOST_SEQUENCES = 32
PROMPT = 16
NEW_TOKENS = 64


class Model:
    """A model with one context; sequences are numbered, tokens are picked greedily."""

    def __init__(self, path: str, threads: int) -> None:
        ll.llama_backend_init()
        self.silence = ll.llama_log_callback(lambda *_: None)
        ll.llama_log_set(self.silence, ctypes.c_void_p(0))
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        parameters = ll.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = CONTEXT, 2048, 512
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.n_seq_max = MOST_SEQUENCES
        parameters.kv_unified = True
        self.context = ll.llama_init_from_model(self.model, parameters)
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(2048, 0, 1)
        self.random = np.random.default_rng(7)

    def prompt(self, size: int) -> list[int]:
        return [int(token) for token in self.random.integers(1_000, 30_000, size)]

    def clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)

    def run(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Run one batch of (token, position, sequence, whether logits are wanted)."""
        self.batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = wanted
        if ll.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")

    def best(self, row: int) -> int:
        logits = ll.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def prefill(self, prompt: list[int], sequence: int = 0) -> int:
        last = len(prompt) - 1
        self.run([(token, i, sequence, i == last) for i, token in enumerate(prompt)])
        return self.best(last)

    def logits_after_each(self, prompt: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Logits after every token of one sequence, float32 ``[len(prompt), vocab]``."""
        self.clear()
        self.run([(token, i, 0, True) for i, token in enumerate(prompt)])
        rows = [ll.llama_get_logits_ith(self.context, row) for row in range(len(prompt))]
        return np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows])

    def prefill_rate(self, size: int) -> float:
        self.clear()
        prompt = self.prompt(size)
        start = time.perf_counter()
        self.prefill(prompt)
        return size / (time.perf_counter() - start)

    def decode_rate(self, context: int, sequences: int = 1) -> float:
        self.clear()
        tokens = [self.prefill(self.prompt(context), sequence) for sequence in range(sequences)]
        start = time.perf_counter()
        for position in range(context, context + NEW_TOKENS - 1):
            self.run([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
            tokens = [self.best(row) for row in range(sequences)]
        return sequences * (NEW_TOKENS - 1) / (time.perf_counter() - start)


def measure(model: Model, kind: str) -> float:
    what, _, number = kind.partition("_")
    if what == "prefill":
        return model.prefill_rate(int(number))
    if what == "decode":
        return model.decode_rate(int(number))
    if what == "batch":
        return model.decode_rate(PROMPT, int(number))
    raise SystemExit(f"unknown kind {kind}")


def requantize(source: str, target: str) -> None:
    """Bring a file to Q4_0, for which llama.cpp has repacked products; its best case, with weights that are worse."""
    parameters = ll.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = 2, True
    if ll.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit("llama_model_quantize failed")


def main() -> None:
    path, threads, *kinds = sys.argv[1:]
    if kinds[0] == "requantize":
        requantize(path, kinds[1])
        return
    model = Model(path, int(threads))
    if kinds[0] == "logits":
        pieces = json.loads(Path(kinds[1]).read_text(encoding="ascii"))
        np.save(kinds[2], np.concatenate([model.logits_after_each(piece) for piece in pieces]))
        return
    model.prefill([1])
    figures: dict[str, Any] = {"start_s": time.perf_counter() - STARTED}
    model.decode_rate(PROMPT)
    for kind in kinds:
        figures[kind] = measure(model, kind)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    figures["peak_rss_mb"] = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    figures["version"] = ll.__version__
    print(json.dumps(figures))


main()
