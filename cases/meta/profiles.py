"""How much generation a test session does: `pr` is short and the same every time, `nightly` is long and random.

Seeds, the database of failures and shrinking are Hypothesis' own: `pytest --hypothesis-seed=N` repeats what N drew.
"""

from __future__ import annotations

from hypothesis import Phase, settings

#: How many times as many examples as in a pull request.
TIMES = {"pr": 1, "nightly": 16}


def generated(profile: str, *, examples: int, seeded: bool) -> settings:
    """Settings of a test that drives an engine with each example. seeded: a seed was given, which pr would not heed.

    There is no deadline, since an engine's first run takes long and no test asserts a time.
    """
    return settings(
        max_examples=examples * TIMES[profile],
        derandomize=profile == "pr" and not seeded,
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        deadline=None,
        print_blob=True,
    )
