"""Scenarios from prompts of the user's: text in a file, through the checkpoint's own tokenizer.

A file is plain text, a prompt a paragraph (or a line, where there is no blank one), or JSON lines with `prompt`, `text`
or `messages`, which go through the chat template. What comes of it are ordinary scenarios. It must not import torch.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness.contract import plain_files
from harness.contract.json_files import NotJSON, parsed
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.usage import UsageError

#: A prompt as the file has it: text, or messages of a chat.
Prompt = str | list[dict[str, Any]]
Encode = Callable[[Prompt], list[int]]
KEYS = ("prompt", "text", "messages")
ANOTHER = "name another file, or give token ids in a scenario file:  --scenario-file FILE"


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file, in order; UsageError for one that has none, or a line that is none."""
    try:
        text = plain_files.named(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UsageError(f"--prompts {file}: cannot be read: {reason}\n  {ANOTHER}") from error
    if file.suffix == ".jsonl" or text.lstrip().startswith("{"):
        numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        found: list[Prompt] = [_of_line(file, number, line) for number, line in numbered]
    else:
        found = [one.strip() for one in re.split(r"\n\s*\n" if re.search(r"\S\s*\n\s*\n\s*\S", text) else r"\n", text)]
    found = [one for one in found if one]
    if not found:
        raise UsageError(f"--prompts {file}: holds no prompt\n  {ANOTHER}")
    return found


def _of_line(file: Path, number: int, line: str) -> Prompt:
    try:
        content = parsed(line.encode())
    except NotJSON as error:
        raise UsageError(f"--prompts {file}: line {number} is not JSON: {error}\n  {ANOTHER}") from error
    found = next((content[key] for key in KEYS if key in content), None) if isinstance(content, dict) else None
    if isinstance(found, str) or (isinstance(found, list) and found and all(isinstance(one, dict) for one in found)):
        return found
    raise UsageError(
        f"--prompts {file}: line {number} has no prompt\n  allowed: an object with {', '.join(map(repr, KEYS))}, "
        "of which the last is a list of messages"
    )


def tokenizer(folder: Path, *, trust_remote_code: bool) -> Encode:
    """The tokenizer of a checkpoint folder; UsageError where there is none."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(
            "--prompts needs the package transformers, which is not installed\n  install it:  pip install transformers"
        ) from error
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise UsageError(
            f"--prompts: --target {folder} has no tokenizer (tokenizer.json)\n"
            "  copy the tokenizer's files there, or give token ids:  --scenario-file FILE"
        )
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # it raises whatever the file at fault made it raise
        raise UsageError(
            f"--prompts: the tokenizer of --target {folder} cannot be loaded: {str(error).splitlines()[0]}\n"
            "  copy the tokenizer's files again, or give token ids:  --scenario-file FILE"
        ) from error

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(found.encode(prompt))
        if not found.chat_template:
            raise UsageError(
                f"--prompts: the tokenizer of --target {folder} has no chat template for 'messages'\n"
                "  give the whole text as 'prompt'"
            )
        text = found.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(found.encode(text, add_special_tokens=False))

    return encode


def tokenized(prompts: Sequence[Prompt], encode: Encode) -> list[tuple[int, ...]]:
    """Token ids of each; UsageError for a prompt of none."""
    found = [tuple(encode(one)) for one in prompts]
    if () in found:
        raise UsageError(f"--prompts: prompt {found.index(()) + 1} has no token\n  leave it out")
    return found


def scenario_of(
    prompts: Sequence[tuple[int, ...]],
    *,
    name: str,
    spec: SpecConfig,
    engine: Mapping[str, Any],
    rate: float,
    new_tokens: int,
    seed: int,
) -> Scenario:
    """One scenario of all of them: requests arrive `rate` a scheduler step on average, at times that the seed decides.

    engine: settings that were asked for; context and pool are as large as the prompts need where they were not.
    """
    rids = [f"p{number}" for number in range(1, len(prompts) + 1)]
    longest = max(map(len, prompts)) + new_tokens + 2 * spec.num_draft_tokens
    usual = EngineConfig()
    running = engine.get("max_running_requests", usual.max_running_requests)
    room = {
        "context_length": max(usual.context_length, longest),
        "max_total_tokens": max(usual.max_total_tokens, min(running, len(prompts)) * longest),
    }
    requests = (
        RequestSpec(rid=rid, input_ids=ids, max_new_tokens=new_tokens) for rid, ids in zip(rids, prompts, strict=True)
    )
    return Scenario(
        name=name,
        seed=seed,
        spec=spec,
        engine=EngineConfig(**{**room, **engine}),
        requests=tuple(requests),
        script=(*_arrivals(rids, rate=rate, seed=seed), Op(kind="drain")),
    )


def _arrivals(rids: Sequence[str], *, rate: float, seed: int) -> Iterator[Op]:
    """Gaps are exponential, as of requests that know nothing of each other; the first one comes at once."""
    draw = random.Random(seed)
    times = [0.0, *accumulate(draw.expovariate(rate) for _ in rids[1:])]
    steps = [int(time) for time in times]
    now = 0
    for step in sorted(set(steps)):
        if step > now:
            yield Op(kind="step", count=step - now)
        now = step
        yield Op(kind="submit", rids=tuple(rid for rid, at in zip(rids, steps, strict=True) if at == step))


def with_prompts(scenario: Scenario, prompts: Sequence[tuple[int, ...]], *, seed: int) -> Scenario:
    """A generated scenario over text: each request has as many tokens as before, of one of the prompts.

    Where it began as an earlier one did, it still does, since some scenarios are about shared prefixes.
    """
    draw = random.Random(f"{scenario.name} {seed}")
    made: dict[tuple[int, ...], tuple[int, ...]] = {}
    for request in scenario.requests:
        before = max(made, key=lambda other: _shared(other, request.input_ids), default=())
        shared = _shared(before, request.input_ids)
        text = draw.choice(prompts)
        begin = draw.randrange(len(text))
        missing = len(request.input_ids) - shared
        following = [text[(begin + at) % len(text)] for at in range(missing)]
        made[request.input_ids] = (*made.get(before, ())[:shared], *following)
    requests = tuple(one.model_copy(update={"input_ids": made[one.input_ids]}) for one in scenario.requests)
    return scenario.model_copy(update={"requests": requests})


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
