from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from mlc_nb.errors import ModelFormatError
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.gguf_tokenizer import GGUFTokenizer, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

# The default model's vocabulary has no token for six control characters and for the bytes that begin U+40000 to U+BFFFF
# (planes without characters). Lone surrogates are no text, and the request models refuse them.
NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=NO_TOKEN, max_codepoint=0x3FFFF)
    | st.characters(min_codepoint=0xC0000)
)
# Text that the default model's vocabulary and the pre-tokenizers have opinions on.
WORDS = st.lists(
    st.sampled_from(
        [
            *(
                "Hello",
                " world",
                "user",
                "don't",
                "I'LL",
                " 'S",
                "_",
                "...",
                "\u2014",
                "1234567890",
                "\uff13\uff14",
                "x²",
            ),
            *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\0", "\u00a0", "\u2028", "\u2581", "\u0120"),
            *("é", "e\u0301", "日本語", "\U0001f469\u200d\U0001f469\u200d\U0001f467"),
            *("<|im_start|>", "<|im_end|>", "<|im_"),
        ]
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> GGUFTokenizer:
    with GGUFFile.open(smollm2_path) as file:
        return load_tokenizer(file.metadata)


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    with GGUFFile.open(smollm2_path) as file:
        return dict(file.metadata)


def test_golden_prompts_have_exactly_the_golden_ids(smollm2: GGUFTokenizer, golden: dict[str, Any]) -> None:
    for prompt in golden["prompts"]:
        encoding = smollm2.tokenizer.encode(prompt["rendered"], add_special_tokens=False)
        assert encoding.ids == prompt["prompt_ids"], prompt["name"]
        assert smollm2.tokenizer.encode(prompt["rendered"]).ids == prompt["prompt_ids"]
        assert smollm2.tokenizer.decode(prompt["generated_ids"]) == prompt["text"]


def test_what_the_default_model_says_about_its_tokens(smollm2: GGUFTokenizer) -> None:
    assert (smollm2.bos_token_id, smollm2.bos_token) == (1, "<|im_start|>")
    assert (smollm2.eos_token_id, smollm2.eos_token) == (2, "<|im_end|>")
    assert smollm2.stop_token_ids == {0, 2}
    assert smollm2.add_bos is False
    assert smollm2.chat_template is not None
    assert smollm2.tokenizer.get_vocab_size() == 49152


def test_the_tokenizer_is_built_fast(metadata: dict[str, Any]) -> None:
    def seconds() -> float:
        start = time.perf_counter()
        load_tokenizer(metadata)
        return time.perf_counter() - start

    best = min(seconds() for _ in range(3))
    print(f"built in {best * 1e3:.0f} ms")
    assert best < 2.5  # 0.12 s on a quiet machine


@given(TEXT | WORDS)
def test_decode_undoes_encode(smollm2: GGUFTokenizer, text: str) -> None:
    ids = smollm2.tokenizer.encode(text, add_special_tokens=False).ids
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_bytes_without_a_token_are_left_out_as_by_the_models_own_tokenizer(smollm2: GGUFTokenizer) -> None:
    for character in [*NO_TOKEN, "\U00040000"]:
        ids = smollm2.tokenizer.encode(f"a{character}b", add_special_tokens=False).ids
        assert smollm2.tokenizer.decode(ids).startswith("a")
        assert smollm2.tokenizer.decode(ids).endswith("b")
        assert character not in smollm2.tokenizer.decode(ids)


def test_special_tokens_in_text_are_parsed_and_left_out_of_answers(smollm2: GGUFTokenizer) -> None:
    ids = smollm2.tokenizer.encode("a<|im_end|>b", add_special_tokens=False).ids
    assert ids[1] == 2
    assert smollm2.tokenizer.decode(ids) == "ab"


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _published(name: str) -> tuple[Any, list[Any]]:
    """What the models' published tokenizer.json files hold for each pre-tokenizer: normalizer, splits."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str) -> Any:
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    return {
        "gpt-2": (None, [split(GPT2_WORDS), to_bytes]),
        "smollm": (None, [split(r"\p{N}"), split(GPT2_WORDS), to_bytes]),
        "llama-bpe": (None, [split(LLAMA3_WORDS), to_bytes]),
        "qwen2": (normalizers.NFC(), [split(LLAMA3_WORDS.replace("{1,3}", "")), to_bytes]),
    }[name]


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_pre_tokenizers_agree_with_the_published_ones(metadata: dict[str, Any], name: str) -> None:
    ours = load_tokenizer({**metadata, "tokenizer.ggml.pre": name}).tokenizer
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    oracle = Tokenizer(BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    normalizer, splits = _published(name)
    if normalizer is not None:
        oracle.normalizer = normalizer
    oracle.pre_tokenizer = pre_tokenizers.Sequence(splits)
    oracle.decoder = decoders.ByteLevel()
    oracle.add_special_tokens(metadata["tokenizer.ggml.tokens"][:17])

    @given(TEXT | WORDS)
    @settings(max_examples=150)
    def check(text: str) -> None:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text, add_special_tokens=False).ids
        whole = normalizer.normalize_str(text) if normalizer is not None and "<|im_" not in text else None
        if normalizer is None or whole is not None:
            assert ours.decode(ids, skip_special_tokens=False) == (whole if whole is not None else text)

    check()


def test_bos_follows_the_file_and_then_the_kind(metadata: dict[str, Any]) -> None:
    without = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    assert load_tokenizer({**without, "tokenizer.ggml.pre": "llama-bpe"}).add_bos is True
    assert load_tokenizer(without).add_bos is False
    assert load_tokenizer({**without, "tokenizer.ggml.add_bos_token": True}).add_bos is True
    no_bos = {key: value for key, value in without.items() if key != "tokenizer.ggml.bos_token_id"}
    loaded = load_tokenizer({**no_bos, "tokenizer.ggml.add_bos_token": True})
    assert (loaded.add_bos, loaded.bos_token, loaded.bos_token_id) == (False, "", None)


def test_user_defined_tokens_are_whole_and_are_written() -> None:
    tokens = [*"abc", "ab", "<|end|>", "<tool>", "  "]
    loaded = load_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 3, 4, 4]),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eot_token_id": 4,
        }
    )
    assert loaded.tokenizer.encode("ab<tool>  c<|end|>", add_special_tokens=False).ids == [3, 5, 6, 2, 4]
    assert loaded.tokenizer.decode([3, 5, 6, 2, 4]) == "ab<tool>  c"
    assert loaded.stop_token_ids == {4}
    assert loaded.chat_template is None


def test_a_trained_byte_level_bpe_comes_back_from_its_gguf_form(metadata: dict[str, Any]) -> None:
    source = Tokenizer(BPE())
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = metadata["tokenizer.chat_template"] * 3 + "the cat sat on the mat; Grüße, 世界! " * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    source.train_from_iterator([text], BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet))
    model = json.loads(source.to_str())["model"]
    ids = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    ours = load_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ids,
            "tokenizer.ggml.merges": merges,
        }
    ).tokenizer

    @given(TEXT | WORDS)
    def check(text: str) -> None:
        assert ours.encode(text).ids == source.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == text

    check()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "needs the pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.pre": None}, "does not name its pre-tokenizer"),
        ({"tokenizer.ggml.pre": 3}, "should have a string under 'tokenizer.ggml.pre'"),
        ({"tokenizer.ggml.model": "rwkv"}, "of the kind 'rwkv'"),
        ({"tokenizer.ggml.model": None}, "of the kind None"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens'; it is missing"),
        ({"tokenizer.ggml.tokens": []}, "has 0 tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "the token 'a' twice, as 0 and 1"),
        ({"tokenizer.ggml.tokens": ["a", ""]}, "Token 1 of the model's vocabulary is empty"),
        ({"tokenizer.ggml.tokens": ["a" * 5000]}, "5000 characters"),
        ({"tokenizer.ggml.token_type": np.array([1])}, "has 1 entries for a vocabulary of 49152"),
        ({"tokenizer.ggml.merges": ["a"]}, "Merge 0 of the model's tokenizer, 'a', joins no two tokens"),
        ({"tokenizer.ggml.merges": ["q \u0394"]}, "joins no two tokens"),
        ({"tokenizer.ggml.merges": ["q z"]}, "makes 'qz', which is no token"),
        ({"tokenizer.ggml.eos_token_id": 49152}, "token ids are 0 to 49151"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "a token id under 'tokenizer.ggml.eos_token_id'"),
        ({"tokenizer.ggml.add_bos_token": 1}, "a truth value under 'tokenizer.ggml.add_bos_token'"),
    ],
)
def test_bad_metadata_are_one_clear_error(metadata: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    changed = {key: value for key, value in (metadata | changes).items() if value is not None}
    with pytest.raises(ModelFormatError, match=sentence):
        load_tokenizer(changed)
