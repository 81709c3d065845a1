"""Templates of requests that ask for something of their tokens, and the keys that any generated request may get."""

from __future__ import annotations

from random import Random
from typing import Any

from cases.boots import Boot
from cases.builder import Builder, Opening, template
from cases.templates.where import on
from harness.checks.logprobs import LOOSE
from harness.contract.requests import CUTTING, RequestSpec
from harness.coverage.rules import KEYS

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def value_of(key: str, random: Random, vocab: int) -> Any:
    """Strong enough to decide tokens, and within what SGLang takes."""
    if key == "top_k":
        return random.choice((2, 3, 8, 40))
    if key in ("top_p", "min_p"):
        return random.choice((0.05, 0.2, 0.5, 0.9))
    if key == "repetition_penalty":
        return random.choice((0.2, 0.7, 1.5, 2.0))
    if key in PENALTIES:
        return random.choice((-2.0, -0.7, 0.7, 2.0))
    tokens = sorted(random.sample(range(vocab), 12))
    if key == "logit_bias":
        return {str(token): random.choice((-100.0, -2.0, 2.0, 4.0)) for token in tokens}
    return tokens  # of a processor


def asking(request: RequestSpec, keys: tuple[str, ...], random: Random, vocab: int) -> RequestSpec:
    """The request with these keys; one that cuts a distribution needs a temperature."""
    more: dict[str, Any] = {key: value_of(key, random, vocab) for key in keys}
    if set(keys) & set(CUTTING) or random.random() < 0.5:
        more["temperature"] = random.choice((0.4, 0.7, 1.0, 1.5))
    if "custom_logit_processor" in more:
        named = more["custom_logit_processor"]
        more |= {"custom_logit_processor": random.choice(("forbid", "force")), "custom_params": {"token_ids": named}}
    return RequestSpec.model_validate(request.model_dump(exclude_defaults=True) | more)


def perhaps_asking(request: RequestSpec, boot: Boot, random: Random) -> RequestSpec:
    """Half of the requests as they are; others sample, or ask for one key or two.

    A repetition penalty comes alone: no source says in which order it and what is added apply; nor what
    log-probabilities are beside some.
    """
    if random.choice((True, False)):
        return request
    known = [key for key in KEYS if key != "custom_logit_processor" or boot.engine.enable_custom_logit_processor]
    known = [key for key in known if not (request.return_logprob and key in LOOSE)]
    keys = random.sample(known, random.choice((0, 1, 1, 2)))
    if "repetition_penalty" in keys:
        keys = ["repetition_penalty"]
    asked = asking(request, tuple(keys), random, boot.vocab)
    return asked if keys else asked.model_copy(update={"temperature": random.choice((0.0, 0.7, 1.0))})


def sampling(request: RequestSpec, random: Random) -> RequestSpec:
    """The request, or with a temperature if it was greedy."""
    drawn = random.choice((0.7, 1.0, 1.3))
    return request if request.temperature else request.model_copy(update={"temperature": drawn})


def single(boot: Boot) -> bool:
    """One engine and one rank: with more, these keys were not driven yet."""
    return not boot.engine.disaggregation and boot.engine.dp_size == 1


def _alike(boot: Boot) -> bool:
    return single(boot) and on("room")(boot)


def _processing(boot: Boot) -> bool:
    return _alike(boot) and boot.engine.enable_custom_logit_processor


def _beside(builder: Builder, *keys: str, new: int | None = None) -> Opening:
    """A request with these keys, and a plain one that arrives with it."""
    asked = builder.request(builder.prompt(builder.length(1, 40)), new=new or builder.long_run())
    builder.timeline.arrive(0, asking(asked, keys, builder.random, builder.boot.vocab))
    builder.arrive(0, builder.length(1, 40), new=builder.long_run())
    return Opening(calm=4, protected=("r0", "r1"), events=False)


def _by(key: str) -> None:
    def build(builder: Builder) -> Opening:
        return _beside(builder, key)

    build.__name__ = f"verify_by_{key}"
    template(fits=_processing if key == "custom_logit_processor" else _alike)(build)


for _key in KEYS:
    _by(_key)


@template(fits=_alike)
def first_token_by_rule(builder: Builder) -> Opening:
    return _beside(builder, builder.random.choice(("top_k", "logit_bias")))


@template(fits=lambda boot: _alike(boot) and not boot.engine.rejection_sampling)
def sampled_beside_greedy(builder: Builder) -> Opening:
    return _beside(builder, builder.random.choice(CUTTING))


@template(fits=_alike, certain=False)
def ruled_after_retraction(builder: Builder) -> Opening:
    opening = _beside(
        builder, builder.random.choice(("top_p", "logit_bias", "frequency_penalty")), new=builder.long_run()
    )
    builder.timeline.at(opening.calm + 8, "retract")
    return opening
