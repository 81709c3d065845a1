"""The reference of a run: loads checkpoints once, replays what an engine did, and generates the plain text.

The only control module that touches torch, through `reference/`; it must not judge and must not know an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cases import adapters
from cases.folders import made_once
from cases.tokenizers import tokenizer_for
from harness import defects
from harness.both_sides import gpus, leases
from harness.contract.known_issues import HEADER
from harness.contract.measured import shared_logits
from harness.contract.requests import RequestSpec
from harness.contract.rows import Rows
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.trace import EOS, Event, Trace
from harness.contract.types import Phase
from harness.driving.footprint import CONTEXT_MIB
from harness.driving.pairs import weights_of
from harness.driving.plan import CPU, Place
from harness.driving.routed import with_turned_ties
from reference import lora
from reference.constraints import Constraints
from reference.logit_rules import Rules
from reference.model import OnLastState, Target
from reference.pairs import AnyHead, load_mixed, load_pair
from reference.routing_ties import Measured, Recorded, watched
from reference.session import Generated, ReferenceSession
from reference.spelling import Spelling

#: Weight files up to this size are of a tiny pair.
TINY = 64 << 20
#: most threads that larger models compute in on a CPU
THREADS = 4
#: The pairs whose target, and whose draft, an engine has, '' for those it was started with; and the target's adapter.
Names = tuple[str, str, str]
OWN: Names = ("", "", "")
#: Of a request for which more than one pair was in force: no text is that of one.
SEVERAL: Names = ("several", "several", "")
#: What a session is asked for: speculation settings, the dtype the engine holds weights in, the dtype to compute in,
#: and which pairs took the place of its own.
Asked = tuple[str, str, str, Names]


@dataclass(slots=True)
class Oracle:
    """Reference sessions by speculation settings over one checkpoint pair; raises CheckpointError for an unfit pair.

    The truth is computed in float32 from the weights as the engine's dtype holds them. Where that is narrower, the same
    rows are computed a second time in the engine's dtype: how far those are off is what rounding alone may do.
    """

    target: Path
    draft: Path
    #: ids of known issues to take for granted; the reference follows those that harness.defects predicts
    assumed: tuple[str, ...] = ()
    place: Place = CPU
    #: who provides the target: paper, transformers, or auto
    provider: str = "auto"
    #: MiB that tensors took at most on a GPU; 0 on a CPU, where nobody counts
    peak_mib: int = 0
    _lease: leases.Lease | None = None
    _models: dict[str, tuple[Target, AnyHead]] = field(default_factory=dict)
    _sessions: dict[Asked, ReferenceSession] = field(default_factory=dict)
    _texts: dict[tuple[str, str, int, tuple[int, ...]], Generated] = field(default_factory=dict)

    def load(self, *, held: str = "float32") -> Oracle:
        """Read the weights (idempotent); worth doing while an engine boots."""
        if held not in self._models:
            # Beside engines and other shards of a night, more threads only wait for each other.
            torch.set_num_threads(min(torch.get_num_threads(), 1 if self._bytes() < TINY else THREADS))
            self._take_lease()
            device = torch.device(self.place.device)
            rounded = getattr(torch, held)
            self._models[held] = load_pair(self.target, self.draft, held=rounded, device=device, provider=self.provider)
        return self

    def following(self, issue: str) -> Oracle:
        """One that takes another known issue for granted, over the same weights."""
        return dataclasses.replace(self, assumed=(*self.assumed, issue), _sessions={}, _texts={})

    @property
    def not_ours(self) -> str:
        """Why the target is not the papers' modules, where they were asked first; empty where it is."""
        return next((str(getattr(target, "instead", "")) for target, _ in self._models.values()), "")

    def _take_lease(self) -> None:
        """On a GPU: a share of it, as an engine has, before anything is on it; it computes on the card leased."""
        if self.place.device == "cpu" or self._lease is not None or not self.place.said:
            return
        asked = leases.request((self.place.said + CONTEXT_MIB) / 1024)
        uuids = [card.uuid for card in gpus.visible(gpus.read_cards(), asked.visible)]
        if number := self.place.device.partition(":")[2]:
            asked = dataclasses.replace(asked, visible=uuids[int(number)])
        self._lease = leases.take(asked, say=lambda _text: None)
        self.place = dataclasses.replace(self.place, device=f"cuda:{uuids.index(self._lease.card.uuid)}")

    def _bytes(self) -> int:
        return sum(file.stat().st_size for folder in (self.target, self.draft) for file in folder.glob("*.safetensors"))

    def answer(self, scenario: Scenario, engine: Trace) -> Trace:
        """The reference trace for what the engine did, with one 'greedy' event a request (see losslessness) and
        one 'logprobs' where it asks for them."""
        held, scenario = str(engine.header.get("dtype") or scenario.engine.dtype), scenario.sampled
        constraints = self._constraints(scenario, engine, held=held)
        languages = constraints.languages if constraints else {}
        changes = weights_in_force(engine)
        adapted: dict[str, Names] = {one.rid: ("", "", one.lora_path) for one in scenario.requests if one.lora_path}
        later = {rid: names for rid, names in of_requests(engine, changes).items() if names != OWN} | adapted

        def replayed(dtype: str, *, expecting: bool) -> Trace:
            session = partial(self._session, scenario.spec, held=held, dtype=dtype)
            heads = [(step, session(names=names).head) for step, names in changes]
            own = {rid: session(names=names).head for rid, names in adapted.items()}
            return session().replay(
                scenario, engine, expecting=expecting, heads=heads, adapted=own, languages=languages
            )

        recorded = Recorded()
        with watched(recorded) if held != "float32" else nullcontext():
            reference = replayed("float32", expecting=True)
        measured = Measured(recorded=recorded)
        if held != "float32":
            with watched(measured):
                reference = with_own(reference, replayed(held, expecting=False))
        texts = self._greedy_texts(scenario, engine, constraints, held=held, later=later)
        texts += () if constraints is None else tuple(constraints.events(engine, scenario.spec))
        said = self._logprobs(scenario, engine, held=held, later=later)
        if self.place.device != "cpu":
            self.peak_mib = torch.cuda.max_memory_allocated(self.place.device) // 2**20
        header = reference.header | ({HEADER: list(self.assumed)} if self.assumed else {})
        found = dataclasses.replace(reference, events=reference.events + texts + said, header=header)
        again = partial(replayed, "float32", expecting=False)
        return with_turned_ties(found, engine, measured, again, scenario) if recorded.edges else found

    def _greedy_texts(
        self,
        scenario: Scenario,
        engine: Trace,
        constraints: Constraints | None,
        *,
        held: str,
        later: Mapping[str, Names],
    ) -> tuple[Event, ...]:
        """The greedy text of each request whose text is known by one model. later: of requests that met others."""
        outputs = {end.rid: end.output_ids for end in engine.ends}
        aborted = {end.rid for end in engine.ends if end.reason == "abort"}
        languages = constraints.languages if constraints else {}
        return tuple(
            self._greedy(
                self._session(scenario.spec, held=held, names=later.get(request.rid, OWN)),
                held=f"{held} {later.get(request.rid, '')}",
                claim=outputs.get(request.rid, ()),
                cut=request.rid in aborted,
                rules=Rules(
                    request=request, ends=request.stops(engine.header.get(EOS, ())), language=languages.get(request.rid)
                ),
                spelling=None if constraints is None else constraints.spelling,
            )
            for request in scenario.requests
            if request.greedy
            and not (request.rules and defects.change_texts(self.assumed))
            and later.get(request.rid, OWN) != SEVERAL
            and not (constraints and request.rid in constraints.why)
        )

    def _logprobs(
        self, scenario: Scenario, engine: Trace, *, held: str, later: Mapping[str, Names]
    ) -> tuple[Event, ...]:
        """Those of each request that asks for them, where its text is known by one model."""
        outputs = {end.rid: end.output_ids for end in engine.ends}
        return tuple(
            self._session(scenario.spec, held=held, names=later.get(request.rid, OWN)).logprobs(
                Rules(request=request), outputs[request.rid]
            )
            for request in scenario.requests
            if request.return_logprob and request.rid in outputs and later.get(request.rid, OWN) != SEVERAL
        )

    def _constraints(self, scenario: Scenario, engine: Trace, *, held: str) -> Constraints | None:
        """What grammars and stop strings say; None where the engine has no tokenizer."""
        folder = tokenizer_for(scenario, self.target)
        if folder is None:
            return None
        vocab, ends = self.load(held=held)._models[held][0].vocab, engine.header.get(EOS, ())
        return Constraints(scenario=scenario, spelling=Spelling(folder), vocab=vocab, ends=ends)

    def _session(self, spec: SpecConfig, *, held: str, dtype: str = "float32", names: Names = OWN) -> ReferenceSession:
        """names: the tiny pairs whose target and draft took the place of these; a draft shares what it shares."""
        asked = (spec.model_dump_json(), held, dtype, names)
        if asked not in self._sessions:
            own = self.load(held=held)._models[held][1]
            if names != OWN:
                target = weights_of(names[0], "target")[0] if names[0] else self.target
                for name, folder in adapters.of_target(target, names[2:] if names[2] else ()).items():
                    place = adapters.beside(target, f"with-{name}-{held}")
                    target = made_once(place, partial(lora.adapted, target, Path(folder), held=getattr(torch, held)))
                draft = weights_of(names[1], "draft")[0] if names[1] else self.draft
                beside = weights_of(names[1], "target")[0] if names[1] else self.target
                summed = torch.float32 if names[2] else None
                own = load_mixed(target, draft, own=beside, held=getattr(torch, held), target_held=summed)
            head = own.computing(getattr(torch, dtype))
            if spec.token_map is not None and isinstance(head, OnLastState):
                head = head.proposing(spec.token_map)
            wanted = defects.departures(self.assumed)
            self._sessions[asked] = ReferenceSession(head.target, head, spec, departures=wanted)
        return self._sessions[asked]

    def _greedy(
        self,
        session: ReferenceSession,
        *,
        held: str,
        claim: tuple[int, ...],
        cut: bool,
        rules: Rules,
        spelling: Spelling | None,
    ) -> Event:
        """The plain greedy text. A claim that one forward confirms token by token *is* that text, by induction.

        cut: the request was aborted, so that the text is wanted as far as it got.
        """
        request, stops = rules.request, rules.ends
        asked = request.model_copy(update={"rid": "", "dp_rank": 0})
        key = (held, asked.model_dump_json(), asked.max_new_tokens, stops)
        whole = _is_whole(claim, request, stops)
        text = self._texts.get(key)
        if text is None and (whole or (cut and _may_go_on(claim, request, stops))):
            text = session.confirm(request.input_ids, claim, rules)
        if text is None:
            text = session.generate_with_margins(request.input_ids, request.max_new_tokens, stops, rules, claim)
            whole = True
        if whole:
            self._texts[key] = text
        stop = None if spelling is None else spelling.stop(request, text.tokens)
        if stop is not None:
            text = Generated(tokens=text.tokens[: stop.length], margins=text.margins[: stop.length])
        data = {"rid": request.rid, "output_ids": list(text.tokens), "margins": list(text.margins)}
        return Event(name="greedy", scheduler_step=0, data=data)


def weights_in_force(engine: Trace) -> list[tuple[int, Names]]:
    """From which scheduler step on an engine had other weights, and whose; an update that failed changes nothing."""
    found, (target, draft, _) = list[tuple[int, Names]](), OWN
    for event in engine.named("update"):
        if event.data["success"]:
            name, selector = str(event.data["what"]), event.data.get("selector", "target")
            target = target if selector == "draft" else name
            draft = draft if selector == "target" else name
            found.append((event.scheduler_step, (target, draft, "")))
    return found


def of_requests(engine: Trace, changes: list[tuple[int, Names]]) -> dict[str, Names]:
    """rid -> whose weights its batches ran with, SEVERAL where they changed in between."""
    found = dict[str, Names]()
    for record in engine.rounds if changes else ():
        names = next((names for step, names in reversed(changes) if step <= record.scheduler_step), OWN)
        for rid in record.rids:
            found[rid] = names if found.get(rid, names) == names else SEVERAL
    return found


#: Columns that say which row a row is.
MEANING = ("rid", "phase", "attempt", "committed", "step", "slot")


def with_own(truth: Trace, own: Trace) -> Trace:
    """`truth` with what a run in the engine's dtype says beside it, if both have the same rows.

    Tensors 'own.<name>' [rows,h] are that run's hidden rows; 'own.logits' [rows of the trace, 1] is the greatest error
    of its logits among the truth's top ones, NaN where a row has none; 'own_distance' of a draw is how far its nearest
    end was.
    """
    kept = [np.flatnonzero(side.rows.strings["phase"] != Phase.ACCEPT) for side in (truth, own)]  # a draw may turn
    columns = [
        {name: ({**side.rows.ints, **side.rows.strings}[name])[at] for name in MEANING}
        for side, at in zip((truth, own), kept, strict=True)
    ]
    if len(kept[0]) != len(kept[1]) or any((columns[0][name] != columns[1][name]).any() for name in MEANING):
        return truth  # the other run chose otherwise somewhere it was free to choose
    beside = {f"own.{name}": tensor for name, tensor in own.tensors.items()}
    errors = np.full((len(truth.rows), 1), np.nan, dtype=np.float32)
    errors[kept[0], 0] = _logit_errors(truth.rows, own.rows, *kept)
    beside["own.logits"] = errors
    far = {_draw(event): event.data["distance"] for event in own.events if "distance" in event.data}
    events = [
        dataclasses.replace(event, data=event.data | {"own_distance": far[_draw(event)]})
        if "distance" in event.data and _draw(event) in far
        else event
        for event in truth.events
    ]
    return dataclasses.replace(truth, tensors={**truth.tensors, **beside}, events=tuple(events))


def _draw(event: Event) -> tuple[object, ...]:
    """Which draw an event speaks of."""
    return (event.dp_rank, event.name, *(event.data.get(key) for key in ("rid", "attempt", "committed", "phase")))


def _logit_errors(truth: Rows, own: Rows, truth_rows: np.ndarray, own_rows: np.ndarray) -> np.ndarray:
    """float32 [m]: greatest difference among the ids that both keep in these rows [m]; NaN where there is none."""
    found = np.full(len(truth_rows), np.nan, dtype=np.float32)
    for both in shared_logits(truth, own, truth_rows, own_rows):
        error = np.where(both.shared, np.abs(both.mine - both.truth), -np.inf).max(axis=1)
        found[both.places] = np.where(both.shared.any(axis=1), error, np.nan)
    return found


def _may_go_on(claim: tuple[int, ...], request: RequestSpec, stops: tuple[int, ...]) -> bool:
    """Whether greedy decoding would not have ended a text of this kind before its last token."""
    return len(claim) <= request.max_new_tokens and not any(token in stops for token in claim[:-1])


def _is_whole(claim: tuple[int, ...], request: RequestSpec, stops: tuple[int, ...]) -> bool:
    """Whether a text has the length that greedy decoding would give it: up to its first stop, or the limit."""
    places = [place for place, token in enumerate(claim) if token in stops]
    whole = min(places[0] + 1, request.max_new_tokens) if places else request.max_new_tokens
    return bool(claim) and len(claim) == whole
