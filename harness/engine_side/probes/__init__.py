"""What watches the engine. It must not change what the engine computes.

Every call of SGLang's that is wrapped, where, and what the trace has from it. The worker's calls are named as in v2;
the table of a release (`both_sides/compat.toml`) has its own names. A trace's header says what was wrapped.

| call | module | what it gives |
| --- | --- | --- |
| `forward_batch_generation` | `probe` | a round: mode, requests, committed lengths |
| `ModelRunner.forward` | `forward_probe` | a row a slot: inputs, hidden rows, logits |
| `_maybe_execute_deferred_mamba_cow_and_clear` | `pool_probe` | recurrent states that a prompt goes on from |
| `TritonAttnBackend.forward_decode`, `forward_extend` | `attention_probe` | KV slots that a forward's attention reads |
| `draft` | `probe` | phase DRAFT; links of the tree |
| `_draft_extend_for_prefill` | `probe` | phase DRAFT_PREFILL; what the target chose after a prompt; proposals |
| `_draft_extend_for_decode` | `probe` | phase EXTEND; proposals |
| `select_top_k_tokens` | `probe` | choices of each DRAFT step |
| `draft_topk1_postprocess` | `probe` | the same, for chains on a GPU |
| `sample`, `eagle_sample`, `verify` (v1) | `verify_probe` | ACCEPT rows |
| `tree_speculative_sampling_target_only` | `verify_probe` | uniforms and thresholds of a sampled verify |
| `chain_speculative_sampling_triton` | `verify_probe` | the same, of rejection sampling |
| `update_regex_vocab_mask` | `verify_probe` | tokens that grammars allow after a prompt |
| `duplicate_prefix_tail_to_draft_branches` | `verify_probe` | copies of a prefix's last page that differ from it |
| `process_prebuilt` | `distributed_probe` | PREBUILT rows: what a decode engine is handed |
| `ModelRunner.forward` under DP attention | `distributed_probe` | draft state and token counts of every rank |
| `Indexer.forward_cuda` of SGLang alone | `index_probe` | which rows a sparse indexer leaves out |
| `start_writing`, `start_loading`, `init_load_back` | `host_probe` | what a hierarchical cache copies, and for whom |
| `update_running_batch`, `check_decode_mem`, `retract_decode` | `host.retraction` | who is taken back, and why |
| `load_model` | `graph_probe` | the model's own `forward`, which the captures below need |
| `capture_begin`, `capture_end`, `replay` | `graph_probe` | rows of the forwards and choices inside a graph |

`snapshot` copies tensors, `staging` brings them to the host through `driver`, `recorder` and `round` keep a round
together, `captured_graph` what a graph does, `names` what releases call things.
"""
