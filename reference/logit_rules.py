"""What a request's settings make of the logits of a row: which token is the best, and the distribution that is drawn.

A token that a verify decides must be the one that decoding without speculation would choose after everything before it,
so a node's rule counts the path that leads to it. Sources, where two say different things the first one:

- frequency and presence penalty: OpenAI's API reference, "Frequency and presence penalties": a token that was generated
  n > 0 times loses n · frequency + presence. Only what was generated counts (also SGLang's documentation).
- repetition penalty: CTRL (arXiv 1909.05858, section 4.1), of the tokens "previously generated" (SGLang's
  documentation); as Hugging Face's RepetitionPenaltyLogitsProcessor, a negative logit is multiplied, not divided.
- logit_bias: OpenAI's API reference: added to the logits before sampling.
- min_new_tokens: Hugging Face's MinNewTokensLengthLogitsProcessor: nothing that ends the request until then.
- temperature, then top-k (arXiv 1805.04833), then top-p (arXiv 1904.09751), then min-p (arXiv 2407.01082), each of what
  the one before has left, divided by its sum: the order of Hugging Face's LogitsProcessorList.
- json_schema, regex, ebnf: what the grammar does not allow (reference.languages).
- custom processors: ours, masks (harness.both_sides.logit_processors).

Penalties come first, then bias, then masks. No source says whether a repetition penalty comes before or after what is
added, so together they are not judged (harness.checks.asked). This module must not know what an engine chose.

Shapes: V vocabulary; texts are whole: the prompt, then what was generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from harness.both_sides.logit_processors import PARAMETER
from harness.contract.requests import ADJUSTING, CUTTING, GRAMMARS, RequestSpec
from reference.languages import Language
from reference.nearness import NOWHERE, Near, nearest, of_end, of_logits, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A request's. ends: the tokens that end it. language: of its grammar, None where it has none or nobody knows."""

    request: RequestSpec
    ends: tuple[int, ...] = ()
    language: Language | None = None
    #: keys that are not followed
    without: frozenset[str] = field(default_factory=frozenset)

    @property
    def greedy(self) -> bool:
        return self.request.greedy

    @property
    def keys(self) -> tuple[str, ...]:
        """Those that it follows, beside the temperature."""
        unknown = GRAMMARS if self.language is None else ()
        return tuple(key for key in self.request.rules if key not in self.without and key not in unknown)

    @property
    def adjusts(self) -> bool:
        """Whether another token than a row's best may be the best by them."""
        return any(key in ADJUSTING for key in self.keys)

    def leaving(self, key: str) -> Rules:
        """All but one of its keys."""
        return replace(self, without=self.without | {key})

    def adjusted(self, logits: Tensor, generated: Sequence[int], counted: Sequence[int] | None = None) -> Tensor:
        """logits [V] after what was generated -> [V]; the same tensor where nothing is adjusted, else float64.

        counted: what penalties and min_new_tokens count of it, None where that is all.
        """
        if not self.adjusts:
            return logits
        counted = generated if counted is None else counted
        asked, kept, values = self.request, set(self.keys), logits.double().clone()
        if counted and {"frequency_penalty", "presence_penalty", "repetition_penalty"} & kept:
            counts = Counter(counted)
            ids = torch.tensor(list(counts), device=values.device)
            own, times = values[ids], torch.tensor(list(counts.values()), device=values.device)
            if "frequency_penalty" in kept:
                own = own - asked.frequency_penalty * times
            if "presence_penalty" in kept:
                own = own - asked.presence_penalty
            if "repetition_penalty" in kept:
                own = torch.where(own < 0, own * asked.repetition_penalty, own / asked.repetition_penalty)
            values[ids] = own
        if "logit_bias" in kept:
            for token, bias in (asked.logit_bias or {}).items():
                values[int(token)] += bias
        if "min_new_tokens" in kept and len(counted) < asked.min_new_tokens:
            values[list(self.ends)] = -torch.inf
        if "custom_logit_processor" in kept:
            named = (asked.custom_params or {})[PARAMETER]
            barred = torch.zeros_like(values, dtype=torch.bool)
            barred[named] = True
            values[barred if asked.custom_logit_processor == "forbid" else ~barred] = -torch.inf
        if self.language is not None and kept & {*GRAMMARS}:
            allowed = self.language.allowed(generated)
            if allowed is not None:
                values[torch.from_numpy(~allowed).to(values.device)] = -torch.inf
        return values

    def distribution(
        self, logits: Tensor, generated: Sequence[int], counted: Sequence[int] | None = None
    ) -> tuple[np.ndarray, Near]:
        """(float64 [V], how near another set of tokens came to being left) of a request that samples.

        Of logits divided by its temperature. See `_apart` for tokens that would have to change places.
        """
        adjusted = self.adjusted(logits, generated, counted)
        left, near = distribution(adjusted, self.request.temperature), NOWHERE
        cuts = {"top_k": self._best_k, "top_p": self._nucleus, "min_p": self._likely}
        for key in CUTTING:
            if key in self.keys:
                kept, gap = cuts[key](left)
                left, near = np.where(kept, left, 0.0), nearest(near, gap)
                left = left / left.sum()
        return left, near

    def _best_k(self, left: np.ndarray) -> tuple[np.ndarray, Near]:
        """The k likeliest; those as likely as the last of them stay too."""
        k = min(self.request.top_k, len(left))
        ordered = np.sort(left)[::-1]
        kept = left >= ordered[k - 1]
        return kept, _apart(left, kept)

    def _nucleus(self, left: np.ndarray) -> tuple[np.ndarray, Near]:
        """The fewest likeliest that have at least p together."""
        order = np.argsort(-left, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(left[order])[:-1]])
        kept = np.zeros(len(left), dtype=bool)
        kept[order] = before < self.request.top_p
        near = [_apart(left, kept)]
        for place in range(max(1, int(kept.sum()) - 1), min(int(kept.sum()) + 1, len(left))):
            within = np.zeros(len(left))
            within[order[:place]] = 1.0
            near.append(of_end(abs(float(before[place]) - self.request.top_p), spread(left, within)))
        return kept, nearest(*near)

    def _likely(self, left: np.ndarray) -> tuple[np.ndarray, Near]:
        """Those at least min_p times as likely as the likeliest."""
        least = self.request.min_p * left.max()
        return left >= least, of_logits(float(np.abs(np.log(left[left > 0] / least)).min(initial=np.inf)))


def _apart(left: np.ndarray, kept: np.ndarray) -> Near:
    """How near the tokens that are left out and kept are to changing places."""
    out = left[~kept].max(initial=0.0)
    return of_logits(float(np.log(left[kept].min() / out))) if out > 0 else NOWHERE


def distribution(logits: Tensor, temperature: float) -> np.ndarray:
    """logits [...,V] -> float64 [...,V]."""
    probabilities: np.ndarray = (logits.double() / temperature).softmax(-1).cpu().numpy()
    return probabilities
