"""Where a failure came from or went: one search over an ordered line of versions, published releases or commits.

`search` decides what to try next, `trials` what the runs of one version add up to, `verdicts` remembers them,
`repository` is a checkout, the line of its commits and worktrees of them (`fitting`: how one is run), `changes`
compares files.
Nothing here starts an engine: whoever searches passes a function that judges.
"""
