"""What an EAGLE, EAGLE-3 or MTP draft should do, from the papers, in PyTorch.

Read in this order:

1. `attention` and `model`: layers that keep their rows, and a target made of them. `llama`, `eagle1` and `eagle3`:
   Llama-like targets and EAGLE's heads. `families`: published mixtures of experts (`mixtures`, `experts`), latent
   attention (`mla`), sinks and gates (`heads`), gated delta networks (`delta`), and their next-token layers (`nextn`).
   `mtp`: MiMo-V2's and Step-3.5's layers. `hf_target`, `hf_module`: a target's own module, where none of ours
   fits. `keys`, `checkpoint`, `rotation` and `pairs` read folders.
2. `draft`: the rotated rows a head reads and the levels of proposals; `tree`: which of them are verified; `verify`:
   which of those are accepted. `windows`: what MTP layers read instead of draft steps.
3. `engine_view` and `timeline`: what an engine did to one request, as much of it as may be looked at. `rows`: how rows
   are written down. `head_drafts`, `layer_drafts` and `rounds`: which rows every batch should have.
4. `session`: replays an engine's run, speculates freely, generates plain text.

To add a draft head: a module with its `ARCHITECTURE` and a class that is a `Head` of `model` (or draws as the layers of
`mtp` do), written from its paper, and a line in `pairs`. A test compares it with an implementation that shares no code
with it (cases/meta/test_reference_*.py: Hugging Face's models). Then a tiny pair and a family: see `cases`. If
scenarios have no name for its algorithm yet, add one to `SpecConfig` (harness/contract/settings.py), with SGLang's
options for it in harness/engines/launch.py.

`departures` names the points at which somebody may say that an engine is known to do otherwise; nothing here does.
"""
