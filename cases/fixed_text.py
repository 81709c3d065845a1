"""The fixed scenarios of the trained pair: prompts are Python source, byte by byte, which its target goes on writing.

To add one: a `program` in `text_shapes`. Pure data; it must not know which bugs exist, and must not import torch or
sglang.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from cases.fixed import CHAIN, DRAIN, PLAIN, abort, boot_program, chosen, steps, submit
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig

#: Snippets of 40 to 300 bytes, each broken off where something must follow.
SNIPPETS = {
    "loop": '''def total(items):
    """Return the sum of all items."""
    result = 0
    for item in items:
''',
    "class": '''class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return "Point(%r, %r)" % (self.x, self.y)

    def __eq__(self, other):
''',
    "import": """import os
import sys
import unittest

from test import support
""",
    "read": """def read_lines(path, encoding="utf-8"):
    with open(path, encoding=encoding) as file:
        lines = file.readlines()
    return [line.rstrip("\\n") for line in lines]


def write_lines(path, lines, encoding="utf-8"):
    with open(path, "w", encoding=encoding) as file:
""",
    "count": """def count_words(text):
    counts = {}
    for word in text.split():
        word = word.lower()
        if word not in counts:
            counts[word] = 0
        counts[word] += 1
    return counts


class Test(unittest.TestCase):
    def test_count(self):
        self.assertEqual(""",
    "raise": """        if not isinstance(value, int):
            raise TypeError(""",
}
TEXT = "\n\n".join(SNIPPETS.values()).encode()


def window(*, seed: int, length: int) -> tuple[int, ...]:
    """`length` bytes of the snippets, read round and round from a random place; the first tells nearby seeds apart."""
    start = random.Random(seed).randrange(len(TEXT))
    first = ord("!") + seed % 90
    return (first, *(TEXT[(start + at) % len(TEXT)] for at in range(1, length)))[:length]


def written(rid: str, snippet: str, *, new: int, stops: tuple[int, ...] = ()) -> RequestSpec:
    """A greedy request that goes on with a snippet."""
    return RequestSpec(rid=rid, input_ids=tuple(SNIPPETS[snippet].encode()), max_new_tokens=new, stop_token_ids=stops)


def text_shapes(
    *,
    checkpoint: str,
    spec: SpecConfig = CHAIN,
    engine: EngineConfig = PLAIN,
    prefix: str = "",
    only: Sequence[str] = (),
) -> list[Scenario]:
    """The common batch shapes over text, on one boot configuration; `only` some of them by name.

    On a small pool also what happens to a part of a batch: it has to run out under three requests.
    """
    program = partial(boot_program, prefix=prefix, checkpoint=checkpoint, spec=spec, engine=engine)
    known = SNIPPETS["read"].encode()
    every = [
        program("single", [written("a", "loop", new=96)], [submit("a"), DRAIN]),
        program(
            "together",
            [
                written("a", "loop", new=64),
                written("b", "class", new=48),
                written("c", "import", new=80),
                written("d", "raise", new=32),
            ],
            [submit(*"abcd"), DRAIN],
            wants=["batch_shrinks", "every_accept_len_seen"],
        ),
        program("chunks", [written("a", "read", new=64)], [submit("a"), DRAIN], wants=["non_final_chunk"], chunk=64),
        program(
            "arrivals",
            [written("a", "count", new=64), written("b", "import", new=48), written("c", "loop", new=32)],
            [submit("a"), steps(4), submit("b"), steps(5), submit("c"), DRAIN],
            wants=["batch_grows", "batch_shrinks"],
        ),
        program(
            "shared-prefix",
            [
                RequestSpec(rid="a", input_ids=tuple(known), max_new_tokens=32),
                RequestSpec(rid="b", input_ids=tuple(known[:160] + SNIPPETS["loop"].encode()), max_new_tokens=48),
            ],
            [submit("a"), steps(24), submit("b"), DRAIN],
            wants=["prefix_hit"],
        ),
        program(
            "abort",
            [written("a", "class", new=96), written("b", "count", new=64)],
            [submit("a", "b"), steps(6), abort("a"), DRAIN],
            wants=["abort_in_decode"],
        ),
    ]
    if engine.max_total_tokens < EngineConfig().max_total_tokens:
        lengths = {"a": ("loop", 66), "b": ("import", 60), "c": ("raise", 63)}
        three = [written(rid, text, new=new) for rid, (text, new) in lengths.items()]
        # what surely runs to its end has its place for all of that (see fixed_parts); no text has a byte of 0
        ending = [written(rid, text, new=new, stops=(0,)) for rid, (text, new) in lengths.items()]
        every += [
            program("pool", ending, [submit(*"abc"), DRAIN], wants=["pool_exhausted", "partial_retraction"]),
            program(
                "taken-back",
                three,
                [submit(*"abc"), steps(5), Op(kind="retract", rids=("b",)), DRAIN],
                wants=["partial_retraction"],
            ),
            program("abort-of-some", three, [submit(*"abc"), steps(4), abort("b"), DRAIN], wants=["abort_of_some"]),
        ]
    return chosen(every, prefix=prefix, only=only)
