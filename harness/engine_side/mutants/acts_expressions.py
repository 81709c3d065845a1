"""Acts that one expression says: what becomes of one value.

Engine side: torch only. A change is made on a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .registry import ACTS, Act, Context, Values

Change = Callable[[Context, torch.Tensor], torch.Tensor]
Parts = tuple[torch.Tensor, ...]

#: A top_k above this stands for the whole vocabulary.
MOST_CUT = 1 << 20


def _features(context: Context, value: torch.Tensor, chosen: Callable[[Parts], Parts]) -> torch.Tensor:
    """Features of a row for an EAGLE-3 head lie side by side, `parts` of one width; one where they do not fit."""
    count = int(context.args["parts"])
    return torch.cat(chosen(value.chunk(count, dim=-1) if value.shape[-1] % count == 0 else (value,)), dim=-1)


def _numbers(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(ids), dtype=ids.dtype, device=ids.device)


#: Act -> the name of the value, none for that of the mutant's `field`, and what becomes of it.
EXPRESSIONS: dict[str, tuple[str, Change]] = {
    "next_page": ("", lambda context, value: value + context.page),
    "moved": ("", lambda context, value: value + int(context.args["by"])),
    "coarse": ("", lambda _, value: value.to(torch.bfloat16)),
    "without_last": ("", lambda _, value: value[:-1]),
    "last_again": ("", lambda _, value: torch.cat((value, value[-1:]))),
    # As wide as one of `parts`, two if nothing is said.
    "narrow": ("", lambda context, rows: rows[:, : rows.shape[1] // int(context.args.get("parts", 2))].contiguous()),
    # The last layer's feature comes first.
    "features_rolled": ("", lambda context, rows: _features(context, rows, lambda parts: (parts[-1], *parts[:-1]))),
    # The feature of the layer below stands in the place of the highest one.
    "feature_repeated": ("", lambda context, rows: _features(context, rows, lambda parts: (*parts[:-1], parts[-2]))),
    # The rows are narrower by one feature.
    "feature_missing": ("", lambda context, rows: _features(context, rows, lambda parts: parts[:-1])),
    # The highest feature alone, as wide as a draft row, so that nothing widens it: fc is skipped.
    "one_feature": ("", lambda context, rows: _features(context, rows, lambda parts: parts[-1:])),
    # Where less than the whole vocabulary was asked for.
    "settings_more": ("", lambda context, own: own.where((own <= 1) | (own >= MOST_CUT), own + context.args["by"])),
    # Offsets added twice, as far as the vocabulary goes.
    "map_twice": ("map", lambda _, ids: (2 * ids - _numbers(ids)).minimum(ids.max())),
    # Draft ids are taken for target ids.
    "map_left_out": ("map", lambda _, ids: _numbers(ids)),
    # Every window of slots begins, and ends, one slot further on.
    "one_slot_late": ("slots", lambda _, slots: torch.cat((slots[1:], slots[-1:]))),
    "first_for_last": ("slots", lambda _, slots: torch.cat((slots[:-1], slots[:1]))),
    "keep_last_page": ("slots", lambda context, slots: slots[slots // context.page != slots[-1] // context.page]),
    "ascending": ("rows", lambda _, rows: rows.sort().values),
    "from_the_front": ("rows", lambda _, rows: _numbers(rows)),
    "mask_of_node_before": ("bits", lambda _, bits: torch.cat((bits[:, :1], bits[:, :-1]), dim=1)),
    # A child's share of the unit interval counts twice.
    "uniforms_halved": ("nodes", lambda _, uniforms: uniforms * 0.5),
    # Everything is drawn from what the target said after the root.
    "distribution_of_root": ("distribution", lambda _, whole: whole[:, :1].expand_as(whole).contiguous()),
    # The last token is drawn from the other end of what is left.
    "final_mirrored": ("final", lambda _, uniform: 1.0 - uniform),
}


def _act(name: str, change: Change) -> Act:
    def act(context: Context, values: Values) -> Values:
        field = name or context.name
        return {field: change(context, values[field])}

    return act


ACTS.update({act: _act(name, change) for act, (name, change) in EXPRESSIONS.items()})
