"""Acts on whole requests: the KV pool, the running batch, limits, idle ranks, and what one engine hands to another.

Engine side: torch only.
"""

from __future__ import annotations

import torch

from .registry import Context, Values, act


@act
def hand_out_again(context: Context, values: Values) -> Values:
    """The last slot of every later allocation is the first slot of the scenario's first one."""
    slots = values["slots"]
    if "held" not in context.memory:
        context.memory["held"] = slots[:1].clone()
        return {}
    return {"slots": torch.cat((slots[:-1], context.memory["held"]))}


@act
def shifted(context: Context, values: Values) -> Values:
    """Every second allocation."""
    context.memory["calls"] = context.memory.get("calls", 0) + 1
    return {"slots": values["slots"] + int(context.args["by"])} if context.memory["calls"] % 2 == 0 else {}


@act
def keep_finished(context: Context, values: Values) -> Values:
    """Every finished request stays for one batch more; SGLang asks who stays several times between two batches."""
    keep = set(values["keep"].tolist())
    for number in values["finished"].nonzero().flatten().tolist():
        if context.memory.setdefault(context.shares[number].rid, context.batch) == context.batch:
            keep.add(number)
    return {"keep": torch.tensor(sorted(keep), dtype=torch.int64)}


@act
def other_step(context: Context, values: Values) -> Values:
    """A step before the first is none: then nothing is committed."""
    return {"steps": (values["steps"] + int(context.args["by"])).clamp(max=int(values["last"]))}


@act
def drop_live(context: Context, values: Values) -> Values:
    """Once, the last of several live requests."""
    if len(values["keep"]) < 2 or context.memory.setdefault("dropped", False):
        return {}
    context.memory["dropped"] = True
    return {"keep": values["keep"][:-1]}


@act
def one_token_more(context: Context, values: Values) -> Values:
    """Once a request."""
    limits = values["limits"].clone()
    for number, share in enumerate(context.shares):
        if share.rid not in context.memory:
            context.memory[share.rid] = True
            limits[number] += 1
    return {"limits": limits}


# -- what a rank without requests takes into a forward --


@act
def kept_state(context: Context, values: Values) -> Values:
    """The state of the rank's last requests."""
    return {} if context.state is None or "hidden" not in values else {"hidden": context.state}


# -- what a prefill engine hands to a decode engine --


@act
def guess_of_the_target(context: Context, values: Values) -> Values:
    """The draft is to go on with what the target has chosen already."""
    ids = values["ids"].clone()
    ids[0] = values["guess"][0]
    return {"ids": ids}


@act
def row_of_another(context: Context, values: Values) -> Values:
    """The next row that something has been written into."""
    own, full = int(values["row"][0]), values["full"].nonzero().flatten().tolist()
    others = [row for row in full if row != own]
    return {"row": torch.tensor(others[:1])} if others else {}


@act
def page_left_behind(context: Context, values: Values) -> Values:
    """The middle page of a part arrives as it was before anything was written to it."""
    changed = {}
    for name, pages in values.items():
        changed[name] = pages.clone()
        changed[name][len(pages) // 2] = 0
    return changed
