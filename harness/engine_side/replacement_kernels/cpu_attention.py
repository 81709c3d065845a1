"""Plain torch attention over SGLang's own KV buffers, indices and masks; replaces two Triton kernels on a CPU.

Engine side: torch only. Works from the named arguments of the kernel it replaces and refuses what it does not
implement, so that a release that starts to use a new feature fails loudly instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: argument -> the values under which it changes nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_cap": (0, 0.0, None),
    "xai_temperature_len": (-1, None),
    "score_mod": (None,),
    "lse_extend": (None,),
    "skip_prefix": (False,),
    "skip_extend": (False,),
}


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        value = arguments.get(name, neutral[0])
        if not any(value is one or value == one for one in neutral):
            raise NotImplementedError(
                f"the CPU replacement of this attention kernel does not implement {name}={value!r}"
            )


def _stored(rows: torch.Tensor, scale: float | None) -> torch.Tensor:
    """What rows of a pool stand for: a quantized one holds them divided by `scale`, where its layer has one."""
    return rows if scale is None or scale == 1.0 else rows * scale


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [m, heads, d], k [s, kv_heads, d], v [s, kv_heads, dv], mask [m, s] bool or None -> [m, heads, dv].

    sinks [heads]: a score beside those of the keys, which takes its share of the softmax and adds nothing.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1).transpose(0, 1)
    values = v.repeat_interleave(group, dim=1).transpose(0, 1)
    scores = torch.matmul(q.transpose(0, 1).float() * scale, keys.float().transpose(1, 2))
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(0), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.matmul(shares, values.float()).transpose(0, 1).to(q.dtype)


def decode_attention(arguments: Mapping[str, Any], *, padded: bool = False) -> None:
    """One query row a sequence: row i sees exactly kv_indices[kv_indptr[i]:kv_indptr[i+1]]; writes `o` in place.

    More rows than sequences are refused, as by the kernel this replaces; padded: such rows see nothing.
    """
    _refuse_unknown(arguments)
    q, out = arguments["q"], arguments["o"]
    k = arguments["k_buffer"].flatten(0, -3)
    v = arguments["v_buffer"].flatten(0, -3)
    starts = arguments["kv_indptr"].tolist()
    indices = arguments["kv_indices"]
    if q.shape[0] > len(starts) - 1:
        assert padded, f"{q.shape[0]} query rows for {len(starts) - 1} sequences"
        out[len(starts) - 1 :].zero_()
    for row in range(min(q.shape[0], len(starts) - 1)):
        slots = indices[starts[row] : starts[row + 1]].long()
        if slots.numel() == 0:  # the padded rows of a batch: the kernel leaves nothing useful there either
            out[row].zero_()
            continue
        keys, values = _stored(k[slots], arguments.get("k_scale")), _stored(v[slots], arguments.get("v_scale"))
        seen = _attend(q[row : row + 1], keys, values, None, arguments["sm_scale"], arguments.get("sinks"))
        out[row] = seen[0].view_as(out[row])


def extend_attention(arguments: Mapping[str, Any]) -> None:
    """Rows qo_indptr[i]:qo_indptr[i+1] see the cached prefix and, causally or by mask, the rows of their own extend."""
    _refuse_unknown(arguments)
    q, out = arguments["q_extend"], arguments["o_extend"]
    scale = arguments.get("sm_scale") or q.shape[-1] ** -0.5
    k_cached = arguments["k_buffer"].flatten(0, -3)
    v_cached = arguments["v_buffer"].flatten(0, -3)
    heads = arguments["k_extend"].shape[1]  # of the layer; its pool may hold more, of which the kernel takes the first
    rows = arguments["qo_indptr"].tolist()
    cached = arguments["kv_indptr"].tolist()
    for i in range(len(rows) - 1):
        own = slice(rows[i], rows[i + 1])
        length = rows[i + 1] - rows[i]
        if length == 0:
            continue
        if _without_mask(arguments, index=i):
            out[own].zero_()
            continue
        slots = arguments["kv_indices"][cached[i] : cached[i + 1]].long()
        k, v = arguments["k_extend"][own], arguments["v_extend"][own]
        if slots.numel():  # where a pool holds latents, rows without a cached prefix are not as wide as it
            k = torch.cat((_stored(k_cached[slots, :heads], arguments.get("k_scale")), k))
            v = torch.cat((_stored(v_cached[slots, :heads], arguments.get("v_scale")), v))
        mask = _extend_mask(arguments, index=i, length=length, prefix=slots.numel())
        out[own] = _attend(q[own], k, v, mask, scale, arguments.get("sinks")).view_as(out[own])


def _without_mask(arguments: Mapping[str, Any], *, index: int) -> bool:
    """Whether a sequence's mask would begin where the mask ends.

    So it is for the sequences that pad a rank's verify to the size of another's: the mask is made before them. The
    kernel reads whatever memory lies there, for rows that nobody reads afterwards; here they see nothing.
    """
    custom = arguments["custom_mask"]
    return custom is not None and int(arguments["mask_indptr"][index]) >= custom.numel()


def _extend_mask(arguments: Mapping[str, Any], *, index: int, length: int, prefix: int) -> torch.Tensor | None:
    """Of a sequence whose `prefix` cached slots are those that its sliding window, if it has one, leaves."""
    window = arguments.get("sliding_window_size") or -1
    windowed = window > 0
    mask = _custom_mask(arguments, index=index, length=length, prefix=prefix, windowed=windowed)
    if mask is None and (arguments["is_causal"] or windowed):
        mask = torch.ones(length, prefix + length, dtype=torch.bool)
        if arguments["is_causal"]:
            mask[:, prefix:] = torch.tril(mask[:, prefix:])
    if mask is not None and windowed:
        rows, keys = torch.arange(prefix, prefix + length).unsqueeze(1), torch.arange(prefix + length)
        mask &= rows <= keys + window
    return mask


def _custom_mask(
    arguments: Mapping[str, Any], *, index: int, length: int, prefix: int, windowed: bool
) -> torch.Tensor | None:
    """It is as wide as the sequence: a window leaves out its first `window_kv_offsets[index]` columns."""
    custom = arguments["custom_mask"]
    if custom is None:
        return None
    start, before = int(arguments["mask_indptr"][index]), 0
    if windowed:
        before = int(arguments["window_kv_offsets"][index])
    width = before + prefix + length
    mask = custom[start : start + length * width].view(length, width)[:, before:].bool().clone()
    if arguments.get("skip_prefix_custom_mask", True):
        mask[:, :prefix] = True
    return mask
