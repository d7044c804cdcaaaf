"""What the arithmetic of products costs in quality: ours and llama.cpp's, each against our float32 path.

python -m benchmarks.quality

Same file, same text (``tests/data/quality_text.txt``), in pieces of 512 tokens from position 0. Top-1 is how often the
likeliest next token is the float32 path's; KL is the mean of KL(float32 || other) in nat; perplexity is of the text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.machine import REPOSITORY, write_result
from benchmarks.versus import LLAMA, peer_python
from mlc_nb.weights.source import resolve_model
from tests.quality.runners import MODEL, Activations, Distributions, load, logits_along, open_runner

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["main"]

TEXT = REPOSITORY / "tests" / "data" / "quality_text.txt"
PIECE = 512


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality")
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)
    ids = load("float32").tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    pieces = [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)][: options.pieces]
    reference = ours("float32", pieces)
    result = {"mlc_nb float32": figures(reference, reference, pieces)}
    for name in ("auto", "int8"):
        result[f"mlc_nb {name}"] = figures(reference, ours(name, pieces), pieces)
    result[LLAMA] = figures(reference, llamas(pieces), pieces)
    for name, found in result.items():
        print(f"{name:<28} " + "  ".join(f"{key} {value:.6g}" for key, value in found.items()))
    if not options.no_write:
        print(write_result("quality", {"tokens": sum(map(len, pieces)), "result": result}))
    return 0


def ours(activations: Activations, pieces: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """Logits after every token, an array a piece."""
    with open_runner(load(activations)) as runner:
        return [np.concatenate(list(logits_along(runner, piece))) for piece in pieces]


def llamas(pieces: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """The same by llama.cpp on the same file."""
    worker = REPOSITORY / "benchmarks" / "llama_worker.py"
    with tempfile.TemporaryDirectory() as directory:
        asked, answered = Path(directory) / "ids.json", Path(directory) / "logits.npy"
        asked.write_text(json.dumps(pieces), encoding="ascii")
        command = [peer_python(), worker, resolve_model(MODEL).path, "2", "logits", asked, answered]
        subprocess.run([str(part) for part in command], check=True, stderr=subprocess.DEVNULL)
        logits = np.load(answered)
    return list(np.split(logits, np.cumsum([len(piece) for piece in pieces])[:-1]))


def figures(
    reference: list[npt.NDArray[np.float32]], found: list[npt.NDArray[np.float32]], pieces: list[list[int]]
) -> dict[str, float]:
    """Top-1 agreement, mean KL and perplexity of ``found``."""
    agreements: list[bool] = []
    divergences: list[float] = []
    surprise = 0.0
    for wanted, other, piece in zip(reference, found, pieces, strict=True):
        agreements.extend(wanted.argmax(axis=-1) == other.argmax(axis=-1))
        theirs = Distributions(other)
        divergences.extend(Distributions(wanted).divergence_of(theirs))
        surprise += theirs.surprise_at(piece[1:])
    predicted = sum(len(piece) - 1 for piece in pieces)
    return {
        "top1": float(np.mean(agreements)),
        "mean_kl": float(np.mean(divergences)),
        "perplexity": float(np.exp(surprise / predicted)),
    }


if __name__ == "__main__":
    sys.exit(main())
