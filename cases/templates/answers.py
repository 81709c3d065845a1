"""Templates of what comes back beside tokens.

Other programs ask for these things too (`cases/generation`); here they come about whatever else is drawn.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.kit import Kit, Opening, template


def _alone(boot: Boot) -> bool:
    return not boot.engine.disaggregation


def _telling(boot: Boot) -> bool:
    return _alone(boot) and boot.engine.enable_return_hidden_states


def _asks(kit: Kit, **asked: object) -> int:
    """One request that decodes for a while and asks for that; the length of its prompt."""
    length = kit.length()
    request = kit.request(kit.prompt(length), new=kit.long_run()).model_copy(update=asked)
    kit.timeline.arrive(0, request)
    return length


@template(fits=_alone, certain=False)
def accepted_run_logprobs(kit: Kit) -> Opening:
    _asks(kit, return_logprob=True, top_logprobs_num=kit.integer(0, 3))
    return Opening(calm=2, protected=("r0",))


@template(fits=_alone)
def sampled_logprobs(kit: Kit) -> Opening:
    temperature = kit.random.choice((0.5, 0.8, 1.0, 1.5))
    length = _asks(kit, return_logprob=True, temperature=temperature, top_logprobs_num=kit.integer(0, 3))
    return Opening(calm=kit.chunks(length) + 2, protected=("r0",))


@template(fits=_alone)
def prompt_logprobs_in_chunks(kit: Kit) -> Opening:
    length = kit.length(kit.chunk + 1)
    request = kit.request(kit.prompt(length), new=kit.new_tokens(2))
    start = kit.integer(0, kit.chunk - 1) if kit.chance() else 0
    asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": kit.integer(0, 3)}
    kit.timeline.arrive(0, request.model_copy(update=asked))
    return Opening(calm=kit.chunks(length) + 1, protected=("r0",))


@template(fits=_alone)
def logprobs_over_retraction(kit: Kit) -> Opening:
    start = kit.random.choice((-1, 0))
    step = kit.chunks(_asks(kit, return_logprob=True, logprob_start_len=start)) + kit.integer(1, 2)
    kit.timeline.at(step, "retract")
    return Opening(calm=step + 1, protected=("r0",))


@template(fits=_alone, certain=False)
def streamed_in_pieces(kit: Kit) -> Opening:
    _asks(kit, stream=True, return_logprob=kit.chance())
    return Opening(calm=2, protected=("r0",))


@template(fits=_alone)
def streamed_by_interval(kit: Kit) -> Opening:
    length = _asks(kit, stream=True, stream_interval=kit.integer(2, 6), return_logprob=kit.chance())
    return Opening(calm=kit.chunks(length) + 2, protected=("r0",))


@template(fits=_telling, certain=False)
def accepted_run_states(kit: Kit) -> Opening:
    for _ in range(kit.integer(1, 2)):
        _asks(kit, return_hidden_states=True)
    return Opening(calm=2, protected=("r0",))
