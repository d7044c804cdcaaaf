"""How much of its speed decode keeps while another program holds one of the cores.

python -m benchmarks.busy_core
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from statistics import median

from benchmarks.machine import write_result
from benchmarks.measure import generate, open_engine

__all__ = ["main"]

PROMPT, TOKENS = 16, 96
GOAL = 0.4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy_core")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)
    ids = random.Random(7)
    quiet, busy = [], []
    with open_engine(options.model, None, "auto") as engine:
        generate(engine, ids, PROMPT, TOKENS)
        for _ in range(options.rounds):
            quiet.append(generate(engine, ids, PROMPT, TOKENS)["decode_tokens_per_s"])
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                time.sleep(0.5)
                busy.append(generate(engine, ids, PROMPT, TOKENS)["decode_tokens_per_s"])
            finally:
                other.kill()
                other.wait()
    kept = [with_other / alone for with_other, alone in zip(busy, quiet, strict=True)]
    print(
        f"decode alone {median(quiet):.0f} token/s, beside a busy process {median(busy):.0f}: keeps {median(kept):.0%}"
    )
    if not options.no_write:
        result = {"goal": GOAL, "kept": median(kept), "quiet_tokens_per_s": quiet, "busy_tokens_per_s": busy}
        print(write_result("busy_core", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
