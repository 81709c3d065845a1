"""Mutants: defects that are put into a running engine, to show that every check can fail.

Where to add a mutant:

1. An entry in `both_sides/mutants.toml`: its name, what it does, the site and phases where it acts, its act, what the
   checks must report. Often that is all, because the act it needs is there already.
2. Its act, if none fits: a line of `acts_expressions` where one expression says what becomes of one value, else a small
   function with `@act` that takes the values of a site and returns those it changes. In `acts_inputs` for what goes
   into a forward or is chosen from it, in `acts_cache` for what its attention reads and for copies to and from the
   host, in `acts_verify` for tree, mask, walk and sampling, in `acts_requests` for the pool, the batch, idle ranks and
   what one engine hands to another.
3. A site, if it acts where none acted before: its name and values in `both_sides/mutants.toml`, and in the module of
   sites that it fits a method, given what it wraps before the arguments of the call, and its place in `places`.

Then `pytest cases/meta/test_mutants.py`, and `eaglecheck mutants --only NAME` on an engine. `needs`, what a scenario
must have for it to show, picks its exercises in `cases/exercises.toml`.

`armed` lets the armed mutants act at a site; `graphs` does so inside CUDA graphs, where a replay runs no Python.
"""
