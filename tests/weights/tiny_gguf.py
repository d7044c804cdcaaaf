"""Writes GGUF files of a few kilobytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write_tiny_gguf(path: Path, *, extra: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_int8("test.int8", -3)
    writer.add_uint64("test.uint64", 1 << 60)
    writer.add_float64("test.float64", 0.5)
    writer.add_bool("test.flag", True)
    writer.add_array("test.floats", [0.5, 1.5])
    writer.add_array("test.flags", [True, False])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<|im_end|>", "é", "世"])
    writer.add_token_types([1, 1, 1, 3, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages[0].content }}")
    extra(writer)
    numbers = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    writer.add_tensor("f32", numbers)
    writer.add_tensor("f16", numbers.astype(np.float16))
    for kind in ("BF16", "Q8_0", "Q4_0", "Q4_1"):
        block_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind.lower(), gguf.quants.quantize(numbers, block_type), raw_dtype=block_type)
    writer.add_tensor("norm", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
