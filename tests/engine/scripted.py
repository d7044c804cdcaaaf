"""A model runner without a model: its next token is a function of the tokens that it finds in its pages.

It keeps token ids where a real runner keeps keys and values, so a page that is shared, lost or mixed up shows at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlc_nb.engine.model import LoadedModel
from mlc_nb.protocol.chat_template import ChatTemplate
from mlc_nb.runtime.memory import MemoryUse

if TYPE_CHECKING:
    from mlc_nb.runtime.sampler import SamplingState
    from mlc_nb.runtime.step import SequenceSlice, StepResult

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TEMPLATE = ChatTemplate(CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>")
CORPUS = ["the quick brown fox jumps over the lazy dog", "Grüße aus Köln, 你好世界 👩‍👩‍👧‍👦", "stop here and there\n\n"]

NextToken = Callable[[list[int]], int]


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


TOKENIZER = make_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
VOCAB_SIZE = TOKENIZER.get_vocab_size()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def mixed(history: list[int]) -> int:
    """A token that depends on every token before it, and is never special."""
    value = 17
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return 3 + value % (VOCAB_SIZE - 3)


def answering(text: str, *, then: int = END) -> NextToken:
    """Answer every prompt that ends with the chat opener (or any other) with ``text``, then with ``then`` for ever."""
    answer = encode(text)
    opener = encode("<|im_start|>assistant\n")

    def next_token(history: list[int]) -> int:
        start = _last_end(history, opener)
        done = len(history) - start
        return answer[done] if done < len(answer) else then

    return next_token


def _last_end(history: list[int], pattern: list[int]) -> int:
    for start in range(len(history) - len(pattern), -1, -1):
        if history[start : start + len(pattern)] == pattern:
            return start + len(pattern)
    raise AssertionError("the prompt has no assistant opener")


class ScriptedRunner:
    """Implements `ModelRunner` on token ids in pages."""

    def __init__(
        self,
        next_token: NextToken,
        *,
        num_pages: int = 64,
        page_size: int = 16,
        step_seconds: float = 0.0,
        sharpness: float = 20.0,
    ) -> None:
        self.page_size = page_size
        self.least_prefill_chunk = 8
        self.num_pages = num_pages
        self.step_seconds = step_seconds
        self.sharpness = sharpness
        self.weight_bytes = 1000
        self.kv_bytes = 8 * num_pages * page_size
        self.closed = False
        self.steps: list[list[int]] = []
        self._next_token = next_token
        self._pages = np.full((num_pages, page_size), -1, dtype=np.int64)
        self._thread = threading.get_ident()

    def logits(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        assert threading.get_ident() == self._thread, "the runner belongs to the engine thread"
        assert not self.closed
        rows = np.zeros((len(slices), VOCAB_SIZE), dtype=np.float32)
        for part in slices:
            for offset, token_id in enumerate(part.token_ids):
                position = part.start_position + offset
                self._pages[part.page_table[position // self.page_size], position % self.page_size] = token_id
        for row, part in zip(rows, slices, strict=True):
            if part.scorer is not None:
                self._score(part)
            if part.sampling is not None:
                history = self._pages[list(part.page_table)].reshape(-1)[: part.start_position + len(part.token_ids)]
                row[self._next_token(history.tolist())] = self.sharpness
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.steps.append([len(part.token_ids) for part in slices])
        return rows

    def step(self, slices: Sequence[SequenceSlice], meanwhile: Callable[[], None] | None = None) -> list[StepResult]:
        if meanwhile is not None:
            meanwhile()
        rows = self.logits(slices)
        return [
            None if part.sampling is None else _sample(part.sampling, row)
            for row, part in zip(rows, slices, strict=True)
        ]

    def _score(self, part: SequenceSlice) -> None:
        history = self._pages[list(part.page_table)].reshape(-1).tolist()
        logits = np.zeros((len(part.token_ids), VOCAB_SIZE), dtype=np.float32)
        for offset, row in enumerate(logits):
            row[self._next_token(history[: part.start_position + offset + 1])] = self.sharpness
        part.scorer.score(part.start_position, logits)

    def resize_kv_cache(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.kv_bytes = 8 * num_pages * self.page_size
        self._pages = np.full((num_pages, self.page_size), -1, dtype=np.int64)

    def memory(self) -> MemoryUse:
        return MemoryUse(weights=self.weight_bytes, kv_cache=self.kv_bytes, workspace=300, logits=4 * VOCAB_SIZE)

    def close(self) -> None:
        self.closed = True


def _sample(sampling: SamplingState, row: npt.NDArray[np.float32]) -> StepResult:
    try:
        return sampling.sample(row)
    except Exception as error:
        return error


def make_model(
    next_token: NextToken = mixed,
    *,
    runners: list[ScriptedRunner] | None = None,
    context: int = 512,
    chat_template: ChatTemplate = CHATML_TEMPLATE,
    **runner: float,
) -> LoadedModel:
    """A loaded model whose runner (also appended to ``runners``) follows ``next_token``."""

    def open_runner() -> ScriptedRunner:
        opened = ScriptedRunner(next_token, **runner)  # type: ignore[arg-type]
        if runners is not None:
            runners.append(opened)
        return opened

    return LoadedModel(
        model_id="scripted",
        tokenizer=TOKENIZER,
        chat_template=chat_template,
        stop_token_ids=frozenset({END}),
        bos_token_id=None,
        add_bos=False,
        context_window_size=context,
        vocab_size=VOCAB_SIZE,
        open_runner=open_runner,
    )
