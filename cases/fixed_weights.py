"""The fixed scenarios of engines that are given other weights while they serve, or have adapters beside them.

Pure data; it must not know which bugs exist, and must not import torch or sglang.
"""

from __future__ import annotations

from cases.boots import Boot, Take
from cases.fixed import ops_of, requests_of
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op


def update(boot: Boot, take: Take, *, running: bool = False) -> Op:
    """running: what runs is taken back for it."""
    source, selector = take
    return Op(kind="update", name=boot.successor, source=source, selector=selector, mode="retract" if running else None)


def weight_shapes(boot: Boot) -> list[Scenario]:
    """Every way for its weights to change between requests, and in the middle of them; the first prompt comes twice."""
    program = boot.program(f"{boot.name}-")
    four = "a 12@41 new=14, b 9@42 new=12, c 12@41 new=10, d 20@43 new=17"
    after, given_back = ops_of("submit c d"), [Op(kind="memory", name=what) for what in ("release", "resume")]
    found = [
        program(
            f"{take[0]}-{take[1]}",
            four,
            [*ops_of("submit a b; drain"), update(boot, take), *after],
            wants="weights_updated" if take[1] == "target" else "draft_updated",
        )
        for take in boot.takes
    ]
    running = [*ops_of("submit a b; step 4"), update(boot, boot.takes[0], running=True), *after]
    memory = [*ops_of("submit a; drain"), *given_back, *ops_of("submit c")]
    return [
        *found,
        program("taken-back", four, running, wants="updated_while_running"),
        program("memory", "a 12@41 new=14, c 12@41 new=10", memory, wants="memory_released"),
    ]


def adapter_shapes(boot: Boot) -> list[Scenario]:
    """A batch of all adapters and none; one prompt with each, of which no other's KV may be taken; some taken back."""
    program = boot.program(f"{boot.name}-")
    names = (None, *boot.engine.lora_paths)

    def adapted(requests: str) -> list[RequestSpec]:
        each = enumerate(requests_of(requests))
        return [one.model_copy(update={"lora_path": names[place % len(names)]}) for place, one in each]

    mixed = adapted("a 9@51 new=16, b 13@52 new=18, c 17@53 new=20, d 21@54 new=22")
    same = adapted(", ".join(f"{rid} 24@61 new=10" for rid in "abcdef"))
    return [
        program("together", mixed, "submit a b; step 3; submit c d", wants="adapters_in_one_batch batch_grows"),
        program(
            "one-prompt",
            same,
            "submit a b c; drain; submit d e f",
            wants="adapters_in_one_batch prefix_hit non_final_chunk",
            chunk=16,
        ),
        program("retracted", mixed, "submit a b c d; step 4; retract", wants="adapters_in_one_batch retract_resume"),
    ]
