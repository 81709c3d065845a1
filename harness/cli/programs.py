"""Which scenarios a command runs: by name, family, file or prompts. It must not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from cases import catalogue, fixed, prompts
from cases.boots import Boot
from cases.families import FAMILIES
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.usage import UsageError, unknown
from harness.driving.adapt import Wanted, refused_setting
from harness.driving.own_pair import OwnPair
from harness.driving.refusals import called

#: More requests than these arrive together in one step.
MOST_ARRIVALS = 1000


def choose_scenarios(
    names: list[str], files: list[Path], family: str | None = None, own: OwnPair | None = None
) -> list[Scenario]:
    """The family's set (None: the default one), or the named ones (that set and the corpus) and those in files.

    own: the user's pair, whose way of drafting the default set then takes, and a family has to have.
    """
    if family is not None and family not in FAMILIES:
        raise UsageError(unknown("family", family, FAMILIES))
    if family is not None and own is not None:
        check_family(family, own)
    usual = fixed.shapes(spec=usual_spec(own)) if family is None else list(FAMILIES[family].scenarios)
    if not names and not files:
        return usual if own is None else list(map(past_eos, usual))
    if family is not None and files and not names:
        raise UsageError("--family has no effect on a --scenario-file\n  leave one of them out")
    known = {scenario.name: scenario for scenario in usual}
    known |= {name: catalogue.load(name).scenario for name in catalogue.names()}
    known = known if own is None else {name: past_eos(one) for name, one in known.items()}
    for name in names:
        if name not in known:
            if name.endswith(".json") or os.path.exists(name):
                raise UsageError(f"--scenario {name}: a scenario in a file\n  type:  --scenario-file {name}")
            raise UsageError(f"{unknown('scenario', name, known)}\n  {_elsewhere(name, family)}")
    chosen = [known[name] for name in names] + [catalogue.read_scenario(path) for path in files]
    seen: dict[tuple[str, str], Path | None] = {}
    for one, file in zip(chosen, [*(None for _ in names), *files], strict=True):
        if (one.name, one.id) in seen:
            before = seen[one.name, one.id] or f"--scenario {one.name}"
            also = f", also by {before}" if file is not None else ""
            raise UsageError(
                f"{called(one, file)} is named twice{also}\n  name it once: the same scenario repeats exactly"
            )
        seen[one.name, one.id] = file
    return chosen


def of_prompts(file: Path, own: OwnPair | None, wanted: Wanted, *, rate: float, new_tokens: int, seed: int) -> Scenario:
    """One scenario of a file's prompts, on the user's pair."""
    if not 0 < rate <= MOST_ARRIVALS:
        raise UsageError(f"--arrivals {rate:g}: requests a scheduler step\n  allowed: above 0, at most {MOST_ARRIVALS}")
    tokens = tokens_of(file, own, wanted)
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", file.stem)[:60] or "prompts"
    try:
        return prompts.scenario_of(
            tokens,
            name=name,
            spec=usual_spec(own),
            engine=wanted.changes(),
            rate=rate,
            new_tokens=new_tokens,
            seed=seed,
        )
    except ValidationError as error:
        raise UsageError(f"--prompts {file}: {refused_setting(error)}") from error


def tokens_of(file: Path, own: OwnPair | None, wanted: Wanted) -> list[tuple[int, ...]]:
    """The prompts of a file in the target's token ids."""
    if own is None:
        raise UsageError(
            "--prompts goes through the tokenizer of a checkpoint\n  name one:  --target FOLDER --draft FOLDER"
        )
    texts = prompts.read_prompts(file)
    encode = prompts.tokenizer(own.target.folder, trust_remote_code=bool(wanted.trust_remote_code))
    return prompts.tokenized(texts, encode)


def past_eos(scenario: Scenario) -> Scenario:
    """One of ours on a pair of the user's: its batches have a shape, which a text that ends at EOS would not give."""
    requests = tuple(
        one if one.stop_token_ids else one.model_copy(update={"ignore_eos": True}) for one in scenario.requests
    )
    return scenario.model_copy(update={"requests": requests})


def usual_spec(own: OwnPair | None) -> SpecConfig:
    """A chain of three steps, as a pair drafts."""
    if own is None:
        return fixed.CHAIN
    steps = min(3, own.layers) if own.algorithm == "MTP" else 3
    return SpecConfig(algorithm=own.algorithm, num_steps=steps, num_draft_tokens=steps + 1)


def check_family(family: str, own: OwnPair) -> None:
    """UsageError for a family that no draft like the user's is in."""
    if own.algorithm in {one.spec.algorithm for one in FAMILIES[family].scenarios}:
        return
    fit = [name for name, one in FAMILIES.items() if own.algorithm in {each.spec.algorithm for each in one.scenarios}]
    drafts = FAMILIES[family].scenarios[0].spec.algorithm
    whose = f"--draft {own.draft.folder} ({own.draft.architecture}) drafts as {own.algorithm}"
    if own.target.folder == own.draft.folder:
        whose = (
            f"the MTP layer in --target {own.target.folder} ({own.target.architecture}) drafts as {own.algorithm}: "
            "one layer runs every step, as with SGLang's NEXTN; MTP is a layer a step"
        )
    raise UsageError(
        f"--family {family} is for drafts of {drafts}, and {whose}\n  leave --family out, or one of: {', '.join(fit)}"
    )


def usual_family(own: OwnPair | None) -> str:
    """The first family whose drafts draft as the user's do."""
    algorithm = "EAGLE" if own is None else own.algorithm
    return next(name for name, one in FAMILIES.items() if one.scenarios[0].spec.algorithm == algorithm)


def of_pair(boots: Mapping[str, Boot], own: OwnPair) -> dict[str, Boot]:
    """The boot configurations that a pair can have, those apart that differ in the checkpoint alone."""
    found: dict[str, Boot] = {}
    for name, one in boots.items():
        fits = one.spec.algorithm == own.algorithm and (own.algorithm != "MTP" or one.spec.num_steps <= own.layers)
        if fits and all((each.spec, each.engine) != (one.spec, one.engine) for each in found.values()):
            found[name] = one
    return found


def _elsewhere(name: str, family: str | None) -> str:
    """The family that has a scenario of that name, else an example of another family."""
    owners = [each for each, one in FAMILIES.items() if any(scenario.name == name for scenario in one.scenarios)]
    if owners:
        return f"it belongs to another family:  --family {owners[0]} --scenario {name}"
    others = [each for each in FAMILIES if each != (family or next(iter(FAMILIES)))]
    example = FAMILIES[others[0]].scenarios[0].name
    return f"other families, see docs/scenarios.md:  --family {others[0]} --scenario {example}  ({', '.join(others)})"
