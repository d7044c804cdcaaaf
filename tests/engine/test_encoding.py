"""Long texts: refused unread where they cannot fit, interruptible where they can."""

from __future__ import annotations

import _thread
import threading
import time
from typing import TYPE_CHECKING

import pytest

from mlc_nb.engine.encoding import LONG_TEXT, encode_text
from mlc_nb.errors import BadRequestError
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.gguf_tokenizer import load_tokenizer
from tests.engine.scripted import TOKENIZER

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

WORDS = "the quick brown fox jumps over the lazy dog, Grüße aus Köln 你好世界. "


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with GGUFFile.open(smollm2_path) as file:
        return load_tokenizer(file.metadata).tokenizer


def test_a_long_text_has_the_same_tokens(tokenizer: Tokenizer) -> None:
    text = WORDS * (1 + LONG_TEXT // len(WORDS))
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert encode_text(tokenizer, text, max_tokens=8192) == expected


def test_a_text_that_cannot_fit_is_refused_at_once(tokenizer: Tokenizer) -> None:
    text = "a" * 30_000_000
    started = time.perf_counter()
    with pytest.raises(BadRequestError, match=r"30000000 characters, which are more than \d+ tokens.* at most 2048"):
        encode_text(tokenizer, text, max_tokens=2048)
    assert time.perf_counter() - started < 1.0


def test_encoding_is_interrupted_and_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    text = WORDS * 60_000
    longest_pause = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal longest_pause
        last = time.perf_counter()
        while not done.wait(0.005):
            now = time.perf_counter()
            longest_pause, last = max(longest_pause, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        encode_text(tokenizer, text, max_tokens=len(text))
    assert time.perf_counter() - started < 1.5
    done.set()
    watcher.join()
    timer.join()
    assert longest_pause < 1.0
    for thread in threading.enumerate():
        if thread.name == "mlc_nb encoder":
            thread.join()


def test_what_the_tokenizer_raises_reaches_the_caller() -> None:
    class Broken:
        normalizer = None

        def get_vocab(self) -> dict[str, int]:
            return TOKENIZER.get_vocab()

        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        encode_text(Broken(), "a" * LONG_TEXT, max_tokens=LONG_TEXT)  # type: ignore[arg-type]
