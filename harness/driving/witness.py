"""The witness: the engine itself in its plainest configuration, asked for the rows that a scenario's text allows.

A draft chain at committed length c is a function of the first c + 1 tokens. So each round is compared with the first
round of a request that is alone and whose prompt is that text: no batch, no prefix cache, no chunks, pages of one
token, no CUDA graph, no overlap, one rank. What is wrong there too, the witness cannot see. Inputs, positions, parents,
selections and the verify walk need no weights and come from `witness_rows`.

It must not judge, and must not know an engine: it says what to drive, and reads what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.trace import ENDS, Trace
from harness.contract.types import Phase
from harness.driving.witness_rows import Expectation, by_slot, expect
from harness.driving.witness_texts import NOTHING, Meaning

#: Prompt tokens, and requests, that one witness scenario holds at most: their states are kept until it is read.
MOST_TOKENS, MOST_REQUESTS = 2**14, 256
#: KV slots of a witness are a multiple of this: few boot configurations.
SLOTS = 4096


def plainest(scenario: Scenario, *, longest: int = 0) -> Scenario:
    """`scenario` as its witness is booted. longest: tokens of the longest prompt."""
    engine, spec = scenario.engine, scenario.spec
    slots = max(engine.max_total_tokens, longest + spec.num_draft_tokens + SLOTS // 2)
    config = EngineConfig(
        dtype=engine.dtype,
        attention_backend=engine.attention_backend,
        context_length=engine.context_length,
        mem_fraction_static=engine.mem_fraction_static,
        trust_remote_code=engine.trust_remote_code,
        server_args=engine.server_args,
        overlap_schedule=False,
        radix_cache=False,
        max_running_requests=1,
        max_total_tokens=-(-slots // SLOTS) * SLOTS,
    )
    chain = SpecConfig(algorithm=spec.algorithm, num_steps=spec.num_steps, num_draft_tokens=spec.num_steps + 1)
    return scenario.model_copy(update={"engine": config, "spec": chain})


@dataclass(slots=True)
class Answer:
    """What a row says: its state [h], and its best logits with their log-sum-exp where it has any."""

    state: np.ndarray | None = None
    lse: float = float("nan")
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    logits: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))


class Witness:
    """The witness of one scenario: what it must be asked, and what it answered."""

    def __init__(self, scenario: Scenario, engine: Trace) -> None:
        self.expected: Expectation = expect(scenario, engine)
        self.answers: dict[Meaning, Answer] = {}
        self.requests, self.ended = 0, False
        #: why something that was asked has no answer, each once
        self.faults: dict[str, None] = {}
        self._states = {row.reads for row in self.expected.rows if row.reads} | {
            row.says for row in self.expected.rows if row.says
        }
        self._logits = {row.says for row in self.expected.rows if row.says and row.choose}

    def scenarios(self) -> Iterator[Scenario]:
        """What to drive, one request after the other; few prompts at a time, the longest first."""
        prompts = self._prompts()
        scenario = self.expected.scenario
        plain = plainest(scenario, longest=max(map(len, prompts), default=0))
        numbered = [
            RequestSpec(rid=f"w{number}", input_ids=prompt, max_new_tokens=tokens, ignore_eos=True)
            for number, (prompt, tokens) in enumerate(sorted(prompts.items(), key=lambda one: (-len(one[0]), one[0])))
        ]
        self.requests = len(numbered)
        for number, requests in enumerate(_portions(numbered)):
            script = [op for one in requests for op in (Op(kind="submit", rids=(one.rid,)), Op(kind="drain"))]
            yield Scenario(
                name=f"witness-{number}-of-{scenario.name}"[:60],
                checkpoint=scenario.checkpoint,
                spec=plain.spec,
                engine=plain.engine,
                requests=tuple(requests),
                script=tuple(script),
            )

    def _prompts(self) -> dict[tuple[int, ...], int]:
        """Prompt -> tokens to generate: one, or two where the steps of a decode round are asked for."""
        texts, wanted = self.expected.texts, dict[int, int]()
        for meaning in self._states:
            if meaning.model == "draft":
                prompt = texts.without(meaning.text, meaning.drafted + 1)
                wanted[prompt] = max(wanted.get(prompt, 1), 2 if meaning.drafted else 1)
            elif meaning in self._logits:
                wanted.setdefault(meaning.text, 1)
        passed = set[int]()
        for text in [*wanted, *sorted((one.text for one in self._states if one.model == "target"), reverse=True)]:
            if text not in passed:
                wanted.setdefault(text, 1)
            while text not in passed and text != NOTHING:
                passed.add(text)
                text = texts.without(text)
        context = int(self.expected.engine.header.get("context_length") or 0)
        prompts = {texts.tokens(text): tokens for text, tokens in wanted.items() if text != NOTHING}
        return {one: tokens for one, tokens in prompts.items() if not context or len(one) + tokens <= context}

    def hear(self, scenario: Scenario, trace: Trace) -> None:
        """Keep what is asked of the rows of one witness scenario."""
        ends = [one.name for one in trace.named(*ENDS)]
        self.ended = self.ended or bool(ends)
        self.faults |= dict.fromkeys(f"the witness ended early ({name})" for name in ends)
        rows = by_slot(trace.rows, "attempt", "rid", "phase", "committed", "step")
        for request in scenario.requests:
            heard = _Heard(trace, rows, request)
            for meaning, row in heard.meanings(self.expected):
                self._keep(trace, meaning, row)
            self.faults |= dict.fromkeys(heard.faults)

    def _keep(self, trace: Trace, meaning: Meaning, row: int) -> None:
        if meaning not in self._states:
            return
        rows, answer = trace.rows, self.answers.setdefault(meaning, Answer())
        at, states = rows.ints["hidden_out"][row], trace.tensors.get(f"hidden_out.{rows.strings['phase'][row]}")
        if answer.state is None and at >= 0 and states is not None:
            answer.state = states[at].copy()
        if not len(answer.ids) and len(rows.lists["top_ids"][row]):
            answer.lse = float(rows.floats["lse"][row])
            answer.ids, answer.logits = rows.lists["top_ids"][row].copy(), rows.lists["top_logits"][row].copy()


class _Heard:
    """One request of a witness scenario: which of its rows are what a witness' rows must be."""

    def __init__(self, trace: Trace, rows: Mapping[tuple[Any, ...], Mapping[int, int]], request: RequestSpec) -> None:
        self._trace, self._rows, self._rid, self._prompt = trace, rows, request.rid, list(request.input_ids)
        self.faults: list[str] = []

    def meanings(self, expected: Expectation) -> Iterator[tuple[Meaning, int]]:
        """(meaning, row), as far as each row was fed what its meaning says, at the position it belongs at."""
        texts, n = expected.texts, len(self._prompt)
        along = texts.along(self._prompt)
        target = self._found(Phase.PREFILL, 0, 0, self._prompt)
        if target is None:
            self.faults.append("a request of the witness was not read in one whole batch")
            return
        for at, row in enumerate(target):
            yield Meaning("target", along[at + 1]), row
        first = self._chosen(target[-1])
        caught = None if first is None else self._found(Phase.DRAFT_PREFILL, 0, 0, [*self._prompt[1:], first])
        if first is None or caught is None:
            self.faults.append("a draft prefill of the witness did not read its prompt one token ahead")
            return
        text = texts.after(along[n], first)
        yield Meaning("draft", text), caught[-1]
        row, step = caught[-1], 0
        while (0, self._rid, Phase.DRAFT, n, step) in self._rows:
            token = self._chosen(row)
            drafted = None if token is None else self._found(Phase.DRAFT, n, step, [token], first=n + step)
            if token is None or drafted is None:
                self.faults.append("a draft step of the witness did not read the proposal before it")
                return
            row, step, text = drafted[0], step + 1, texts.after(text, token)
            yield Meaning("draft", text, step), row

    def _found(
        self, phase: Phase, committed: int, step: int, tokens: Sequence[int], first: int = 0
    ) -> list[int] | None:
        """Row numbers of these tokens at positions first, first + 1, …; None if the rows are others."""
        slots = self._rows.get((0, self._rid, phase, committed, step), {})
        if sorted(slots) != list(range(len(tokens))):
            return None
        found, ints = [slots[slot] for slot in range(len(tokens))], self._trace.rows.ints
        fed, positions = ints["input_id"][found].tolist(), ints["position"][found].tolist()
        return found if fed == list(tokens) and positions == list(range(first, first + len(tokens))) else None

    def _chosen(self, row: int) -> int | None:
        chosen = self._trace.rows.lists["chosen_ids"][row]
        return int(chosen[0]) if len(chosen) == 1 else None


def _portions(requests: Sequence[RequestSpec]) -> Iterator[list[RequestSpec]]:
    portion, size = list[RequestSpec](), 0
    for one in requests:
        if portion and (size + len(one.input_ids) > MOST_TOKENS or len(portion) == MOST_REQUESTS):
            yield portion
            portion, size = [], 0
        portion.append(one)
        size += len(one.input_ids)
    if portion:
        yield portion
