"""Where a failure came from or went: over published releases, then over commits.

`search` decides what to try next, `repeats` how often and what that is worth, `verdicts` remembers, `subjects` says
what counts as the failure, `published` which releases there are, `commits`, `fitting` and `trees` deal with a checkout,
`changes` compares two releases' files. Nothing here starts an engine: whoever searches passes a function that judges.
"""
