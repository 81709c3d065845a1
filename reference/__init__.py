"""What an EAGLE, EAGLE-3 or MTP draft should do, from the papers, in PyTorch.

Read in this order:

1. `model`: what targets and heads are made of, and that a forward runs new rows over kept ones; `attention`: which
   rows those see. `keys` and `checkpoint` read folders, `rotation`, `heads`, `mla`, `delta` and `experts` are parts of
   layers. `llama` and `families` put targets together, `eagle1`, `eagle3`, `nextn` and `mtp` heads; `pairs` loads both.
2. `draft`: the rotated rows a head reads and the levels of proposals; `tree`: which of them are verified; `verify`:
   which of those are accepted. `windows`: what MTP layers read instead of draft steps.
3. `engine_view` and `timeline`: what an engine did to one request, as much of it as may be looked at. `rows`: how rows
   are written down. `head_drafts`, `layer_drafts` and `rounds`: which rows every batch should have.
4. `session`: replays an engine's run, speculates freely, generates plain text.

To add an architecture: a line in `llama.ARCHITECTURES` or a function in `families`, which reads every key that changes
the arithmetic; a key or tensor that nobody reads is refused. To add a draft head: a class that is a `Head` of `model`
(or draws as the layers of `mtp` do), written from its paper, and a line in `pairs`. A test compares either with an
implementation that shares no code with it: a function in cases/meta/published*.py makes random checkpoints over its
switches, and Hugging Face's layers say what is right. Then a tiny pair and a family: see `cases`. If scenarios have no
name for a head's algorithm yet, add one to `SpecConfig` (harness/contract/scenario.py), with SGLang's options for it in
harness/engines/launch.py.

`departures` names the points at which somebody may say that an engine is known to do otherwise; nothing here does.
"""
