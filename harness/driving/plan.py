"""Records of what to run, where, and how engines are started for it. Records only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases.adapters import of_target
from cases.tokenizers import tokenizer_for
from harness.both_sides.leases import Request
from harness.contract.providers import AUTO
from harness.contract.scenario import Scenario
from harness.driving.own_pair import OwnPair
from harness.engines.envs import EngineEnv
from harness.engines.launch import CpuAttention, build_launch
from harness.engines.process import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a reference computes: a torch device, the dtype weights are held in, and what it said it takes (MiB)."""

    device: str = "cpu"
    held: str = "float32"
    said: int | None = None


#: Where tiny pairs are computed.
CPU = Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an engine and its reference were started; a replay repeats it.

    pair: the folders of a pair of the user's. reference: which provider was asked (see harness.contract.providers).
    """

    release: str
    device: str = "cpu"
    revert: int | None = None
    cpu_attention: CpuAttention = "torch"
    assumed: tuple[str, ...] = ()
    pair: tuple[str, str] | None = None
    reference: str = AUTO

    @classmethod
    def told(cls, engine: Mapping[str, Any], *, assumed: tuple[str, ...] = ()) -> Setup:
        """That of a stored run, by what it tells of its engine: trace headers, or its manifest."""
        target, draft = engine.get("pair") or ("", "")
        return cls(
            release=str(engine.get("release") or ""),
            device=str(engine.get("device") or "cpu"),
            revert=engine.get("revert"),
            assumed=assumed,
            pair=(str(target), str(draft)) if draft else None,
        )

    def launch(
        self,
        scenario: Scenario,
        *,
        env: EngineEnv,
        folders: tuple[Path, Path],
        own: OwnPair | None,
        lease: Request | None,
        probe: bool = True,
        mutants_in_graphs: bool = False,
    ) -> Launch:
        """How the engine for a scenario is started. folders: of target and draft; lease: what that engine waits for."""
        target, draft = folders
        return build_launch(
            env=env,
            spec=scenario.spec,
            engine=scenario.engine,
            target=target,
            draft=draft,
            tokenizer=tokenizer_for(scenario, target),
            adapters=of_target(target, scenario.engine.lora_paths),
            device=self.device,
            probe=probe,
            revert=self.revert,
            cpu_attention=self.cpu_attention,
            assumed=self.assumed,
            eos=None if own is None else own.target.eos,
            lease=lease,
            mutants_in_graphs=mutants_in_graphs,
        )

    def plain(self) -> dict[str, Any]:
        """As a reproducer keeps it."""
        known = {"release": self.release, "device": self.device, "assumed": list(self.assumed)}
        known |= {"cpu_attention": self.cpu_attention, "reference": self.reference}
        return known | ({"pair": list(self.pair)} if self.pair else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run and where. pairs: (target, draft) folders by scenario.checkpoint; own: those that the user named.

    place: where the reference computes. copies, ahead: how engines are started (see harness.driving.pool). lease: the
    share of a GPU that every engine takes first. time_limit: seconds that the scenarios of one boot configuration may
    take, its boot apart; those that are left then are not driven.
    """

    env: EngineEnv
    setup: Setup
    scenarios: tuple[Scenario, ...]
    pairs: dict[str, tuple[Path, Path]]
    root: Path
    own: OwnPair | None = None
    place: Place = CPU
    lease: Request | None = None
    argv: tuple[str, ...] = ()
    copies: bool = False
    ahead: int = 0
    time_limit: float | None = None

    def launch(self, scenario: Scenario, *, lease: Request | None, probe: bool = True) -> Launch:
        """See Setup.launch."""
        folders = self.pairs[scenario.checkpoint]
        return self.setup.launch(scenario, env=self.env, folders=folders, own=self.own, lease=lease, probe=probe)
