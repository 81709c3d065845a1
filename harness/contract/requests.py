"""What a request asks for, under SGLang's own names.

This module must not import torch, sglang or any other room.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from harness.both_sides.logit_processors import PARAMETER, Processor

#: Why a number is not allowed to be larger: what a message about it says behind what is allowed.
SEED_IS = "SGLang keeps seeds in 64 bits"
LEAST_TEMPERATURE = 1e-6
TEMPERATURE_IS = "below 0.000001 SGLang takes it for 0, which is greedy, and far above 1 every token is as likely"

BIAS_IS = "at 100 nothing else is chosen, and float32 has no room for differences of logits beside much more"

Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Bias = Annotated[float, Field(ge=-1e9, le=100.0, description=BIAS_IS)]
NewTokens = Annotated[
    int, Field(ge=0), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]})
]
JsonSchema = Annotated[
    str | None, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})
]

#: Keys that any request has: what else it asks for is likelier to be to blame.
PLAIN = ("rid", "input_ids", "max_new_tokens", "dp_rank", "expect")
#: Keys that hold a text to a grammar.
GRAMMARS = ("json_schema", "regex", "ebnf")
#: Keys that change which token is the best of a row, and those that cut a distribution off.
ADJUSTING = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "custom_logit_processor"),
    *("min_new_tokens", *GRAMMARS),
)
CUTTING = ("top_k", "top_p", "min_p")
#: Keys that say which log-probabilities come back, where any do.
OF_LOGPROBS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob")
#: What SGLang takes for the schema of any JSON text.
ANY_JSON = "$$ANY$$"
EXAMPLE = '{"type": "boolean"}'
#: What max_new_tokens null is until its scenario says how much room is left; nobody can write it.
NO_NUMBER = -1


class Strict(BaseModel):
    """A frozen record of a scenario, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestSpec(Strict):
    """One request; its prompt is token ids, and temperature 0 is greedy.

    expect: what becomes of it; refusal: SGLang does not take it, since it is too long or the queue is full;
    exhaustion: it alone outgrows the pool, and SGLang gives it up.

    It ends at the checkpoint's EOS too, unless ignore_eos; tiny pairs of ours have none that counts. What is left
    at its default is not sent. unlimited: max_new_tokens was null, as it is sent and written in JSON; the number is the
    one that SGLang comes to (`scenario.numbered`).
    input_embeds: SGLang gets the target's own embeddings of the prompt's tokens, and never sees their ids.
    """

    rid: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")]
    input_ids: Annotated[tuple[int, ...], Field(min_length=1)]
    max_new_tokens: NewTokens = 16
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False, description=TEMPERATURE_IS)] = 0.0
    sampling_seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(default=None, description=SEED_IS)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(10**6), le=10**6)] | None = None
    dp_rank: Annotated[int, Field(ge=0)] = 0
    lora_path: str | None = None
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Share = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    logit_bias: dict[str, Bias] | None = None
    custom_logit_processor: Processor | None = None
    custom_params: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    json_schema: JsonSchema = None
    regex: str | None = None
    ebnf: str | None = None
    require_reasoning: bool = False
    n: Annotated[int, Field(ge=1, le=16)] = 1
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=64)] = 0
    token_ids_logprob: tuple[int, ...] = ()
    return_hidden_states: bool = False
    stream: bool = False
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    unlimited: SkipJsonSchema[bool] = False
    input_embeds: bool = False
    expect: Literal["answer", "refusal", "exhaustion"] = "answer"

    @field_validator("max_new_tokens", mode="wrap")
    @classmethod
    def _number_or_none(cls, value: Any, check: ValidatorFunctionWrapHandler) -> int:
        return NO_NUMBER if value is None else int(check(value))

    @model_serializer(mode="wrap")
    def _as_written(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        made: dict[str, Any] = write(self)
        if info.mode == "json" and made.pop("unlimited", False):
            made["max_new_tokens"] = None
        return made

    @field_validator("temperature")
    @classmethod
    def _sampled_or_greedy(cls, value: float) -> float:
        if 0.0 < value < LEAST_TEMPERATURE:
            raise ValueError(
                f"{value:g} is neither greedy nor sampled: {TEMPERATURE_IS}\n"
                f"  allowed: 0, or {LEAST_TEMPERATURE:f} to 100"
            )
        return value

    @field_validator("top_k")
    @classmethod
    def _cuts_to_some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to draw, and SGLang refuses it\n  allowed: -1 (all), or 1 and above")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _biases_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not re.fullmatch(r"0|[1-9][0-9]*", key):
                raise ValueError(f'key {key!r} is no token id\n  allowed: token ids as text, for example {{"17": 2.0}}')
        return value

    @field_validator("stop_regex")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"pattern {pattern!r} cannot be read: {error}\n  allowed: what Python's re.compile takes"
                ) from error
        return value

    @field_validator("stop", "stop_regex")
    @classmethod
    def _stops_at_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty text is in every answer\n  allowed: texts of one character or more")
        return value

    @field_validator(*GRAMMARS)
    @classmethod
    def _grammar_says_something(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("an empty text is no grammar\n  allowed: null (leave it out), or a text")
        return value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_as_text(cls, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, dict) else value

    @field_validator("json_schema")
    @classmethod
    def _schema_is_json(cls, value: str | None) -> str | None:
        try:
            json.loads("{}" if value in (None, ANY_JSON) else str(value))
        except ValueError as error:
            raise ValueError(
                f"is no JSON: {error}\n  allowed: a JSON schema, for example {EXAMPLE}, or the same in quotes"
            ) from error
        return value

    def __hash__(self) -> int:
        return hash(self.model_dump_json(exclude_defaults=True))  # what holds a dict has no hash of its own

    @property
    def asked(self) -> tuple[str, ...]:
        """The keys that are not at their defaults."""
        fields = type(self).model_fields
        return tuple(key for key in fields if getattr(self, key) != fields[key].get_default())

    def stops(self, eos: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end it where the checkpoint's are `eos`."""
        return self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos)

    @property
    def ends_by_text(self) -> bool:
        """Whether strings or patterns may end it: where, check `texts` says."""
        return bool(self.stop or self.stop_regex)

    @property
    def runs(self) -> tuple[RequestSpec, ...]:
        """What SGLang makes of it: itself, or with n > 1 a request that reads the prompt, `.0`, then n samples."""
        if self.n == 1:
            return (self,)
        reads = {"rid": f"{self.rid}.0", "n": 1, "max_new_tokens": 1, "unlimited": False, "stream": False}
        samples = (self.model_copy(update={"rid": f"{self.rid}.{i}", "n": 1}) for i in range(1, self.n + 1))
        return (self.model_copy(update=reads), *samples)

    @property
    def greedy(self) -> bool:
        """Whether it takes the best token of each row: at temperature 0, or where only one token is left."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def rules(self) -> tuple[str, ...]:
        """The keys that decide, beside the temperature, which token a row's logits mean; of a greedy one the cuts do
        not."""
        return tuple(key for key in self.asked if key in ADJUSTING or (key in CUTTING and not self.greedy))

    @model_validator(mode="after")
    def _processor_knows(self) -> RequestSpec:
        given = (self.custom_params or {}).get(PARAMETER)
        if self.custom_logit_processor and not (
            isinstance(given, list) and given and all(type(one) is int and one >= 0 for one in given)
        ):
            raise ValueError(
                f"custom_logit_processor {self.custom_logit_processor!r} needs custom_params.{PARAMETER}\n"
                "  allowed: a list of one token id or more"
            )
        return self

    @model_validator(mode="after")
    def _least_is_no_more_than_most(self) -> RequestSpec:
        if self.min_new_tokens > self.max_new_tokens != NO_NUMBER:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}\n"
                f"  allowed: 0 to {self.max_new_tokens}, or a larger max_new_tokens"
            )
        return self

    @model_validator(mode="after")
    def _one_grammar(self) -> RequestSpec:
        held = [key for key in GRAMMARS if getattr(self, key) is not None]
        if len(held) > 1:
            raise ValueError(f"{' and '.join(held)} in one request, which follows one grammar\n  allowed: one of them")
        return self

    @model_validator(mode="after")
    def _pieces_are_asked_for(self) -> RequestSpec:
        if self.stream_interval is not None and not self.stream:
            raise ValueError(
                "stream_interval needs stream true\n  allowed: set stream to true, or leave stream_interval out"
            )
        return self

    @model_validator(mode="after")
    def _logprobs_come_back(self) -> RequestSpec:
        asked = [key for key in OF_LOGPROBS if key in self.asked]
        if asked and not self.return_logprob:
            raise ValueError(
                f"{asked[0]} needs return_logprob true\n  allowed: set return_logprob to true, or leave {asked[0]} out"
            )
        if self.logprob_start_len > len(self.input_ids):
            raise ValueError(
                f"logprob_start_len {self.logprob_start_len} is beyond the prompt of {len(self.input_ids)} tokens\n"
                f"  allowed: -1 (generated tokens only), or 0 to {len(self.input_ids)}"
            )
        return self

    @model_validator(mode="after")
    def _stops_count(self) -> RequestSpec:
        if self.ignore_eos and self.stop_token_ids:
            raise ValueError(
                "ignore_eos is true beside stop_token_ids, which SGLang then ignores too\n  allowed: one of them"
            )
        return self


#: Keys that go to SGLang as sampling parameters as they are, and those that go beside them.
SAMPLING = (
    *("top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
    *("logit_bias", "custom_params", "stop", "stop_regex", "no_stop_trim", "json_schema", "regex", "ebnf", "n"),
    *("stop_token_ids", "sampling_seed", "stream_interval"),
)
GENERATE = (
    *("custom_logit_processor", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_hidden_states", "stream", "require_reasoning", "lora_path", "input_embeds"),
)
