"""Templates of what comes back beside tokens.

Other programs ask for these things too (`cases/generation`); here they come about whatever else is drawn.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.builder import Builder, Opening, template


def _alone(boot: Boot) -> bool:
    return not boot.engine.disaggregation


def _telling(boot: Boot) -> bool:
    return _alone(boot) and boot.engine.enable_return_hidden_states


def _asks(builder: Builder, **asked: object) -> int:
    """One request that decodes for a while and asks for that; the length of its prompt."""
    length = builder.length()
    request = builder.request(builder.prompt(length), new=builder.long_run()).model_copy(update=asked)
    builder.timeline.arrive(0, request)
    return length


@template(fits=_alone, certain=False)
def accepted_run_logprobs(builder: Builder) -> Opening:
    _asks(builder, return_logprob=True, top_logprobs_num=builder.integer(0, 3))
    return Opening(calm=2, protected=("r0",))


@template(fits=_alone)
def sampled_logprobs(builder: Builder) -> Opening:
    temperature = builder.random.choice((0.5, 0.8, 1.0, 1.5))
    length = _asks(builder, return_logprob=True, temperature=temperature, top_logprobs_num=builder.integer(0, 3))
    return Opening(calm=builder.chunks(length) + 2, protected=("r0",))


@template(fits=_alone)
def prompt_logprobs_in_chunks(builder: Builder) -> Opening:
    length = builder.length(builder.chunk + 1)
    request = builder.request(builder.prompt(length), new=builder.new_tokens(2))
    start = builder.integer(0, builder.chunk - 1) if builder.chance() else 0
    asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": builder.integer(0, 3)}
    builder.timeline.arrive(0, request.model_copy(update=asked))
    return Opening(calm=builder.chunks(length) + 1, protected=("r0",))


@template(fits=_alone)
def logprobs_over_retraction(builder: Builder) -> Opening:
    start = builder.random.choice((-1, 0))
    step = builder.chunks(_asks(builder, return_logprob=True, logprob_start_len=start)) + builder.integer(1, 2)
    builder.timeline.at(step, "retract")
    return Opening(calm=step + 1, protected=("r0",))


@template(fits=_alone, certain=False)
def streamed_in_pieces(builder: Builder) -> Opening:
    _asks(builder, stream=True, return_logprob=builder.chance())
    return Opening(calm=2, protected=("r0",))


@template(fits=_alone)
def streamed_by_interval(builder: Builder) -> Opening:
    length = _asks(builder, stream=True, stream_interval=builder.integer(2, 6), return_logprob=builder.chance())
    return Opening(calm=builder.chunks(length) + 2, protected=("r0",))


@template(fits=_telling, certain=False)
def accepted_run_states(builder: Builder) -> Opening:
    for _ in range(builder.integer(1, 2)):
        _asks(builder, return_hidden_states=True)
    return Opening(calm=2, protected=("r0",))
