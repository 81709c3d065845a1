"""What is driven: fixed and generated scenarios, the corpus of known bugs, and the tiny pairs they run on.

| to add | write |
| --- | --- |
| a fixed scenario | a table in `fixed.toml`; where it depends on its boot, a `program` in a module `fixed_…` |
| a known bug | a file in `corpus/`; `catalogue` says what its keys mean |
| a family | a table in `families.toml`, its boots in `boots.toml`, its name in docs/scenarios.md and README |
| what a mutant can show in | a table in `exercises.toml` |
| a way to bring about a coverage point | a function in a module of `templates` |
| a change that must not matter | a function in `meta/relations` |
| a pair | a line in `pairs.RECIPES` |
| a trained pair | a folder as `training.train` writes it, and a line in `pairs.RECIPES` |
| a draft head | first `reference`; then a record in `recipes`, a `*_weights` module and a line in `pairs.KINDS` |
| | that make its pair, and a family that names the pair |

`engine/` tests with a real engine, `meta/` tests the harness without one. Nothing here knows how a verdict is reached.
"""
