"""What of a failure can be one file that needs SGLang alone: see `eaglecheck export`."""

from __future__ import annotations

from harness.contract.scenario import Scenario

#: What of a script can be driven from inside SGLang's loop.
OPS = ("submit", "step", "abort", "drain")
#: What is asked of a request that one file can ask for, and that decides what comes back.
ASKS = {"rid", "input_ids", "max_new_tokens", "temperature", "sampling_seed", "stop_token_ids", "ignore_eos", "dp_rank"}
#: Pairs that are read from files.
TRAINED = "trained-"


def no_file(scenario: Scenario, *, own_pair: bool) -> str:
    """Why this cannot be one file, in words; empty where it can. own_pair: its pair is a user's."""
    ops = {op.kind for op in scenario.script} - {*OPS}
    drains = [at for at, op in enumerate(scenario.script) if op.kind == "drain"]
    asks = {key for each in scenario.requests for key in each.asked} - ASKS
    if ops:
        return f"its script has {', '.join(sorted(ops))}"
    if any(at != len(scenario.script) - 1 for at in drains):
        return "its script goes on behind a drain"
    if asks:
        return f"its requests ask for {', '.join(sorted(asks))}"
    if scenario.spec.adaptive is not None:
        return "its number of steps adapts"
    if scenario.spec.token_map is not None or scenario.engine.lora_paths:
        return "its engine has files beside the pair: a token map, or adapters"
    if scenario.checkpoint.startswith(TRAINED):
        return "its pair was trained, and no seed makes it"
    return "its pair is none of ours" if own_pair else ""
