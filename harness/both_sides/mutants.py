"""The registry of mutants: defects that can be put into a running engine, and what the checks must then report.

Both sides: standard library only. The entries are in mutants.toml; the sites and acts behind their words are in
`engine_side/mutants`, which runs inside the engine. It must not change anything by itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

#: Where a mutant can act, and the values it finds there: the engine computes on with what the mutant leaves.
SITES = {
    "inputs": "what goes into a forward: input_ids, positions, slots, hidden",
    "plan": "what attention reads: slots, starts of each row's or request's, and keys, the cache of a layer",
    "choices": "what a draft step chose, before beams are picked: ids, probs, scores",
    "proposals": "what a draft over a prompt or over committed tokens hands to the next round: ids, probs, hidden",
    "vocabulary": "the map from draft ids to target ids that a round's draft steps use: map",
    "head": "what makes a draft's states logits: own, target's where it is of the same shape",
    "candidates": "the nodes kept for the tree: parents, selected, tokens",
    "tails": "copies of a prefix's last page at the beginning of branches: last_page",
    "tree": "the tree as the target sees it: mask, next_token, next_sibling",
    "accept": "the walk: predict, accept_index, drafts",
    "uniforms": "what decides a sampled verify: nodes, final, and distribution, the target's probabilities",
    "masks": "which tokens grammars allow after each node: bits",
    "ending": "a text that its stop strings end: length, in tokens",
    "settings": "what a batch asks of its tokens: temperatures, top_ks, top_ps, logit_bias",
    "forward": "whether a forward runs, and how often",
    "alloc": "slots the pool hands out",
    "free": "slots given back to the pool",
    "window": "slots that sliding windows reach, as attention is given them: slots",
    "eviction": "how far a request has come when what left its windows is given back: length",
    "window-free": "slots given back to the pool of sliding windows while their request runs: slots",
    "commit": "which of a verify's recurrent states a request keeps: steps, -1 for none, and last, the greatest",
    "host-store": "what a pool's rows are copied to on the host: host, device, and draft, whether they are a draft's",
    "host-load": "the opposite, layer by layer: host, device, layer, and draft",
    "storage-write": "where a page begins that the host gives to storage: host, and draft",
    "storage-read": "where on the host a page of storage is put: host, and draft",
    "host-alloc": "slots that the host's pool hands out: slots",
    "batch": "who stays in the running batch",
    "requests": "of the requests in a batch: limits, stops, aborted",
    "queue": "how many requests may wait: limit",
    "retraction": "whom of a batch the engine keeps first where the pool runs out: order",
    "kept": "whose draft state stays when a batch loses requests: rows",
    "idle": "what a rank without requests takes into a forward: as inputs, and counts, the tokens of each rank",
    "weights": "whether a model takes new weights: loads, and draft, whether it is one",
    "adapters": "which LoRA adapter each request of a batch has: ids, −1 for none",
    "flush": "whether the prefix cache is emptied: empties",
    "reduced": "what a TP rank brings to a sum over all ranks, and what it gets: part, sum",
    "gathered": "what a TP rank brings to values that lie side by side, and what it gets: part, whole",
    "sent": "what a prefill side hands over beside KV: ids",
    "rows": "which metadata row a decode side reads: row",
    "arrived": "what a prebuilt batch is made of: hidden",
    "bonus": "the token a prebuilt batch begins with: bonus",
    "pages": "pages of KV that travel, by buffer",
    "answers": "what is sent back of one request: logprobs, states, and the counts verifies, cached and completion",
}

#: Those that lie in what CUDA graphs of a round replay, and the phases that do.
REPLAYED = ("inputs", "plan", "choices", "candidates", "vocabulary", "forward")
ROUNDS = {"DRAFT", "EXTEND", "VERIFY"}

#: What a scenario must have for a mutant to show.
NEEDS = {
    "chain": "a chain draft (t = 1)",
    "tree": "a tree draft (t > 1)",
    "eagle3": "an EAGLE-3 head with three features and a vocabulary of its own",
    "token-map": "a chain draft that proposes some tokens only",
    "own-head": "an EAGLE-3 head with logits of its own over the whole vocabulary",
    "layers": "an MTP draft with three layers",
    "chained": "an MTP draft with three layers that read each other's output",
    "chunk": "prompts longer than a chunk",
    "update": "weights that are updated while the engine serves",
    "draft-update": "weights of a draft that are updated while the engine serves",
    "adapters": "requests with and without LoRA adapters in one batch",
    "memory": "memory that is released and resumed while the engine serves",
    "mixed": "requests that decode in a batch of prompt chunks",
    "retraction": "a retraction while requests run",
    "abort": "a request that is aborted while it runs",
    "queue": "more requests at once than may wait",
    "pool": "requests that outgrow the pool together",
    "partial-retraction": "a retraction of some of the requests that run, the others in another order",
    "stop": "stop ids that occur in the text",
    "window": "layers with sliding windows that have a KV pool of their own, and requests longer than those",
    "recurrent": "layers that keep a recurrent state",
    "mamba": "the same of Mamba-2",
    "host": "a hierarchical cache, a draft pool of its own, and prefixes that come back from the host",
    "storage": "a host cache with storage behind it, and prefixes that come back from there",
    "pages": "pages of more than one slot",
    "paged-tree": "a tree draft over pages of more than one slot",
    "dp": "DP attention with an idle rank",
    "dp-layers": "an MTP draft with three layers under DP attention",
    "dp-lm-head": "the same with logits that each rank computes of its own requests alone",
    "coordinated": "a DP rank that verifies beside another's prefill",
    "adaptive": "a number of draft steps that changes while the engine serves",
    "tp": "two TP ranks",
    "handoff": "prefill and decode on two engines, several requests at once",
    "sampled": "requests with a temperature, several at once",
    "grammar": "requests with a grammar",
    "strings": "stop strings that occur in the text",
    "rules": "requests with rules of their own for their tokens, several at once",
    "answers": "requests that ask for log-probabilities, one of them streamed",
    "states": "requests that ask for hidden states",
}

#: What a mutant may do to the output.
TEXTS = ("same", "differs")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mutant.

    site: one of SITES. phases: where it acts, () if none are meant. act: a function of `engine_side/mutants`; args are
    for it, and `tp_rank` among them lets it act on that TP rank alone. kinds: what may show it (words of
    harness.contract.types.Kind): killed means that one of these is reported. needs: one of NEEDS. text: what usually
    happens to the output; said, not judged.
    """

    id: str
    family: str
    what: str
    act: str
    kinds: tuple[str, ...]
    site: str = "inputs"
    phases: tuple[str, ...] = ()
    needs: str = "chain"
    text: str = "same"
    args: Mapping[str, Any]

    @property
    def replayed(self) -> bool:
        """Whether it acts in what CUDA graphs replay, where only those that the graphs hold can."""
        drafts = self.site in ("choices", "candidates", "vocabulary")
        return self.site in REPLAYED and set(self.phases) <= ROUNDS and bool(drafts or self.phases)


_KNOWN = {one.name for one in fields(Mutant)}


def _mutant(family: str, name: str, entry: dict[str, Any]) -> Mutant:
    own: dict[str, Any] = {}
    args: dict[str, Any] = {}
    for key, value in entry.items():
        if key in ("kinds", "phases"):
            own[key] = tuple(value.split())
        else:
            (own if key in _KNOWN else args)[key] = value
    return Mutant(id=name, family=family, args=args, **own)


def _read() -> dict[str, Mutant]:
    with Path(__file__).with_name("mutants.toml").open("rb") as file:
        families = tomllib.load(file)
    found = [_mutant(family, name, entry) for family, entries in families.items() for name, entry in entries.items()]
    return {mutant.id: mutant for mutant in found}


#: Every mutant by id, in the order of the file.
MUTANTS: dict[str, Mutant] = _read()
