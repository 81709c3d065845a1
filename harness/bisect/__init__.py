"""Where a failure came from or went: one search over an ordered line of versions, published releases or commits.

`search` decides what to try next, `trials` what the runs of one version add up to, `verdicts` remembers them, `commits`
is the line of a checkout (`repository`: git, `fitting` and `trees`: how one commit is run), `changes` compares files.
Nothing here starts an engine: whoever searches passes a function that judges.
"""
