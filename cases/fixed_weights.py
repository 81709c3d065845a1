"""The fixed scenarios of engines that are given other weights while they serve, or have adapters beside them.

Pure data; it must not know which bugs exist, and must not import torch or sglang.
"""

from __future__ import annotations

from cases.boots import Boot, Take
from cases.fixed import DRAIN, request, steps, submit
from harness.contract.scenario import Scenario
from harness.contract.script import Op


def update(boot: Boot, take: Take, *, running: bool = False) -> Op:
    """running: what runs is taken back for it."""
    source, selector = take
    return Op(kind="update", name=boot.successor, source=source, selector=selector, mode="retract" if running else None)


def memory(what: str) -> Op:
    return Op(kind="memory", name=what)


def weight_shapes(boot: Boot) -> list[Scenario]:
    """Every way for its weights to change between requests, and in the middle of them; the first prompt comes twice."""
    program = boot.program(f"{boot.name}-")
    first, second = request("a", 12, seed=41, new=14), request("b", 9, seed=42, new=12)
    again, third = request("c", 12, seed=41, new=10), request("d", 20, seed=43, new=17)
    found = [
        program(
            f"{source}-{selector}",
            [first, second, again, third],
            [submit("a", "b"), DRAIN, update(boot, (source, selector)), submit("c", "d"), DRAIN],
            wants=["weights_updated" if selector == "target" else "draft_updated"],
        )
        for source, selector in boot.takes
    ]
    return [
        *found,
        program(
            "taken-back",
            [first, second, again, third],
            [submit("a", "b"), steps(4), update(boot, boot.takes[0], running=True), submit("c", "d"), DRAIN],
            wants=["updated_while_running"],
        ),
        program(
            "memory",
            [first, again],
            [submit("a"), DRAIN, memory("release"), memory("resume"), submit("c"), DRAIN],
            wants=["memory_released"],
        ),
    ]


def adapter_shapes(boot: Boot) -> list[Scenario]:
    """A batch of all adapters and none; one prompt with each, of which no other's KV may be taken; some taken back."""
    program = boot.program(f"{boot.name}-")
    names = (None, *boot.engine.lora_paths)
    mixed = [
        request(rid, 9 + 4 * place, seed=51 + place, new=16 + 2 * place).model_copy(
            update={"lora_path": names[place % len(names)]}
        )
        for place, rid in enumerate("abcd")
    ]
    same = [
        request(rid, 24, seed=61, new=10).model_copy(update={"lora_path": names[place % len(names)]})
        for place, rid in enumerate("abcdef")
    ]
    return [
        program(
            "together",
            mixed,
            [submit("a", "b"), steps(3), submit("c", "d"), DRAIN],
            wants=["adapters_in_one_batch", "batch_grows"],
        ),
        program(
            "one-prompt",
            same,
            [submit("a", "b", "c"), DRAIN, submit("d", "e", "f"), DRAIN],
            wants=["adapters_in_one_batch", "prefix_hit", "non_final_chunk"],
            chunk=16,
        ),
        program(
            "retracted",
            mixed,
            [submit(*"abcd"), steps(4), Op(kind="retract"), DRAIN],
            wants=["adapters_in_one_batch", "retract_resume"],
        ),
    ]
