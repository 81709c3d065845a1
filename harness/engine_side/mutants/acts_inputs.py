"""Acts on what goes into a forward, row by row, and on what is chosen from what comes out.

Engine side: torch only. A change is made on copies: the engine computes on with what an act returns, and the probe
records it.

Symbols: rows of a request are found through `Context.shares`; h is the width of a state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .registry import Context, Share, Values, act


def _moved(context: Context, values: Values, source: Callable[[Share, int], int]) -> Values:
    """The field with each row the mutant is about taken from row `source(share, row)`."""
    before = values[context.name]
    after, rows = before.clone(), set(context.rows())
    for share in context.shares:
        for row in range(share.first, share.last + 1):
            if row in rows:
                after[row] = before[source(share, row)]
    return {context.name: after}


@act
def add(context: Context, values: Values) -> Values:
    after = values[context.name].clone()
    for row in context.rows():  # a list of rows would have to reach the device, which a graph's capture forbids
        after[row] += int(context.args["by"])
    return {context.name: after}


@act
def zero(context: Context, values: Values) -> Values:
    after = values[context.name].clone()
    for row in context.rows():
        after[row] = 0
    return {context.name: after}


@act
def previous_row(context: Context, values: Values) -> Values:
    return _moved(context, values, lambda share, row: max(row - 1, share.first))


@act
def next_row(context: Context, values: Values) -> Values:
    return _moved(context, values, lambda share, row: min(row + 1, share.last))


@act
def first_row(context: Context, values: Values) -> Values:
    return _moved(context, values, lambda share, row: share.first)


@act
def neighbour(context: Context, values: Values) -> Values:
    """From the next request of the batch: row by row, or tail from tail where only last rows are meant."""
    partner = {
        share.rid: other for share, other in zip(context.shares, context.shares[1:] + context.shares[:1], strict=True)
    }

    def source(share: Share, row: int) -> int:
        other = partner[share.rid]
        from_start = other.first + min(row - share.first, other.rows - 1)
        return other.last if context.args.get("at") == "last" else from_start

    return _moved(context, values, source)


@act
def frozen(context: Context, values: Values) -> Values:
    """Every later step of a round, or layer, gets what the first one had."""
    step, first = context.memory.get("first", (context.step, None))
    if context.step <= step:
        context.memory["first"] = context.step, values[context.name].clone()
        return {}
    return {context.name: first.clone()}


@act
def restart(context: Context, values: Values) -> Values:
    after = values[context.name].clone()
    for share in context.shares:
        after[share.first : share.last + 1] -= share.start
    return {context.name: after}


@act
def target_guess(context: Context, values: Values) -> Values:
    after, rows = values[context.name].clone(), set(context.rows())
    for number, share in enumerate(context.shares):
        if share.last in rows and context.guesses is not None:
            after[share.last] = context.guesses[number]
    return {context.name: after}


@act
def from_before(context: Context, values: Values) -> Values:
    """The first step of a round gets what the request had there one round earlier."""
    if context.step > 0:
        return {}
    before, after = values[context.name], values[context.name].clone()
    for share in context.shares:
        old = context.memory.get(share.rid)
        context.memory[share.rid] = before[share.first : share.last + 1].clone()
        if old is not None:
            after[share.first : share.last + 1] = old
    return {context.name: after}


@act
def second_best(context: Context, values: Values) -> Values:
    """Each row's choices without the best one."""
    ids = values[context.name]
    if context.logits is None or context.logits.shape[0] != ids.shape[0]:
        return {}
    runners_up = context.logits.topk(ids.shape[-1] + 1, dim=-1).indices[:, 1:]
    return {context.name: runners_up.to(ids.dtype)}


# -- what any value may become, where the site has it --


@act
def become(context: Context, values: Values) -> Values:
    """The `value` everywhere. of: "draft" where only drafts are meant."""
    if context.name not in values or (context.args.get("of") == "draft" and not values["draft"]):
        return {}
    return {context.name: torch.full_like(values[context.name], context.args["value"])}


@act
def of_neighbour(context: Context, values: Values) -> Values:
    """Each request has what the next one should have; with `by` 1, the one before."""
    names = [name for name in context.name.split() if name in values]
    return {name: values[name].roll(int(context.args.get("by", -1)), 0) for name in names}


@act
def mirrored(context: Context, values: Values) -> Values:
    return {context.name: values[context.name].flip(-1)} if context.name in values else {}


@act
def squared(context: Context, values: Values) -> Values:
    return {context.name: values[context.name] ** 2} if context.name in values else {}


# -- between the layers of a multi-layer MTP draft; `Context.step` is the layer --


@act
def tail_kept(context: Context, values: Values) -> Values:
    """The last row's token is not replaced by what the layer before proposed."""
    before, ids = context.memory.get("before"), values["input_ids"]
    context.memory["before"] = ids.clone()
    if context.step == 0 or before is None:
        return {}
    after, rows = ids.clone(), [share.last for share in context.shares]
    after[rows] = before[rows]
    return {"input_ids": after}


@act
def deep_state_of_previous_row(context: Context, values: Values) -> Values:
    """Layers behind the first one read each row's state from the row before."""
    return previous_row(context, values) if context.step else {}


@act
def state_of_layer_before_last(context: Context, values: Values) -> Values:
    """From the third layer on, each reads what the layer before it read, not what that one said."""
    before, context.memory["read"] = context.memory.get("read"), values["hidden"].clone()
    return {} if context.step < 2 or before is None else {"hidden": before}


@act
def layers_exchanged(context: Context, values: Values) -> Values:
    """The first two layers' proposals change places."""
    ids = values["ids"]
    if ids.shape[1] < 2:
        return {}
    return {"ids": ids[:, [1, 0, *range(2, ids.shape[1])]]}


# -- what TP ranks exchange --


@act
def left_out(context: Context, values: Values) -> Values:
    """A rank goes on with its own part in the place of the sum."""
    return {"sum": values["part"]}


@act
def shards_swapped(context: Context, values: Values) -> Values:
    """The shards of the last dimension lie in the opposite order."""
    whole, width = values["whole"], values["part"].shape[-1]
    return {"whole": torch.cat(whole.split(width, dim=-1)[::-1], dim=-1)}


@act
def of_target(context: Context, values: Values) -> Values:
    return {"own": values["target"]}
