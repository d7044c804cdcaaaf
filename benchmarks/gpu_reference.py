"""What the GPU kernels are held against: the same mathematics in torch, in float64, from the definitions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc_nb.compiler.kernels.cuda.attention import CudaAttentionShape

__all__ = ["RandomMatrix", "attention", "page_indices", "random_matrix", "relative_error", "rope_tables", "rotate"]


class RandomMatrix:
    """A tensor as a file holds it, and its values.

    Attributes
    ----------
    source, source_scales
        The bytes of its rows; MLC's scales, else None.
    values
        float32 ``[rows, columns]``.
    """

    def __init__(self, source: Any, source_scales: Any, values: Any) -> None:
        self.source = source
        self.source_scales = source_scales
        self.values = values


def random_matrix(torch: Any, block_type: str, rows: int, columns: int) -> RandomMatrix:
    """Random blocks of a type, whose values have a spread of about 0.02."""
    if block_type in ("F16", "BF16"):
        dtype = torch.float16 if block_type == "F16" else torch.bfloat16
        plain = (torch.randn(rows, columns, device="cuda") * 0.02).to(dtype)
        return RandomMatrix(plain.view(torch.uint8), None, plain.float())
    blocks = columns // 32
    sign = torch.randint(0, 2, (rows, blocks), device="cuda") * 2 - 1
    spread = 0.0003 if block_type == "Q8_0" else 0.004
    scale = (sign * spread * (0.5 + torch.rand(rows, blocks, device="cuda"))).half()
    if block_type == "Q8_0":
        code = torch.randint(-128, 128, (rows, blocks, 32), device="cuda", dtype=torch.int8)
        source = torch.cat([scale.view(torch.uint8).view(rows, blocks, 2), code.view(torch.uint8)], dim=2)
        return RandomMatrix(source, None, (code.float() * scale.float()[..., None]).view(rows, columns))
    code = torch.randint(0, 15 if block_type == "q4f16_1" else 16, (rows, blocks, 32), device="cuda", dtype=torch.uint8)
    if block_type == "q4f16_1":
        source = (code[..., 0::2] | code[..., 1::2] << 4).contiguous()
        return RandomMatrix(source, scale, ((code.float() - 7) * scale.float()[..., None]).view(rows, columns))
    nibbles = code[..., :16] | code[..., 16:] << 4
    header = [scale.view(torch.uint8).view(rows, blocks, 2)]
    values = (code.float() - 8) * scale.float()[..., None]
    if block_type == "Q4_1":
        offset = (torch.randn(rows, blocks, device="cuda") * 0.02).half()
        header.append(offset.view(torch.uint8).view(rows, blocks, 2))
        values = code.float() * scale.float()[..., None] + offset.float()[..., None]
    return RandomMatrix(torch.cat([*header, nibbles], dim=2).contiguous(), None, values.view(rows, columns))


def relative_error(out: Any, reference: Any) -> float:
    """``|out - reference| / |reference|``; NaN where the output has any."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm())


def rope_tables(torch: Any, positions: int, head_dim: int) -> tuple[Any, Any]:
    """Cosines and sines, float32 ``[positions, head_dim / 2]``, of base 10000."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device="cuda", dtype=torch.float64) / head_dim)
    angle = torch.arange(positions, device="cuda", dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(torch: Any, heads: Any, positions: Any, cosines: Any, sines: Any) -> Any:
    """Rotary embedding of float64 ``[tokens, heads, head_dim]``, halves rotated."""
    half = heads.shape[-1] // 2
    cosine, sine = cosines.double()[positions.long(), None], sines.double()[positions.long(), None]
    low, high = heads[..., :half], heads[..., half:]
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def page_indices(torch: Any, shape: CudaAttentionShape) -> tuple[Any, Any]:
    """Where a page holds its keys and its values: int64 ``[16, stored_dim]`` each, as ``pages.cuh`` says."""
    token = torch.arange(16, device="cuda")[:, None]
    dim = torch.arange(shape.stored_dim, device="cuda")[None, :]
    keys = ((dim // 32 * 2 + token // 8) * 32 + token % 8 * 4 + dim % 32 // 8) * 8 + dim % 8
    values = (dim // 16 * 32 + dim % 8 * 4 + token % 8 // 2) * 8 + dim % 16 // 8 * 4 + token // 8 * 2 + token % 2
    return keys, values


def attention(torch: Any, queries: Any, keys: Any, values: Any, first_position: int) -> Any:
    """Causal attention in float64.

    ``[t, q heads, d]``, ``[context, kv heads, d]`` twice -> ``[t, q heads, d]``; query i is at ``first_position + i``.
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,chd->htc", queries.double(), keys) * queries.shape[-1] ** -0.5
    position = first_position + torch.arange(queries.shape[0], device="cuda")
    hidden = torch.arange(keys.shape[0], device="cuda")[None, :] > position[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("htc,chd->thd", weights, values)
