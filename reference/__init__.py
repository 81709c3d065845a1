"""What an EAGLE, EAGLE-3 or MTP draft should do, from the papers, in PyTorch: whole sequences, no KV cache.

Read in this order:

1. `model`: a Llama or Qwen3 target and EAGLE's draft head. `eagle3`, `mla` (DeepSeek-V3's latent attention and NextN
   layer) and `mtp` (MiMo-V2's and Step-3.5's layers) are other pairs; `checkpoint` and `pairs` read folders;
   `hf_target` is a target's own module from Hugging Face, where none of ours fits.
2. `draft`: the rotated rows a head reads and the levels of proposals; `tree`: which of them are verified; `verify`:
   which of those are accepted. `windows`: what MTP layers read instead of draft steps.
3. `engine_view` and `timeline`: what an engine did to one request, as much of it as may be looked at. `rows`: how rows
   are written down. `head_drafts`, `layer_drafts` and `rounds`: which rows every batch should have.
4. `session`: replays an engine's run, speculates freely, generates plain text. `expected`: what the reference's own
   proposals would have been accepted for in each of the engine's rounds.

To add a draft head: a module with its `ARCHITECTURE` and a class that is a `Head` of `model` (or draws as the layers of
`mtp` do), written from its paper, and a line in `pairs`. A test compares it with an implementation that shares no code
with it (cases/meta/test_reference_*.py: Hugging Face's models). Then a tiny pair and a family: see `cases`. If
scenarios have no name for its algorithm yet, add one to `SpecConfig` (harness/contract/scenario.py), with SGLang's
options for it in harness/engines/launch.py.

`departures` names the points at which somebody may say that an engine is known to do otherwise; nothing here does.
"""
