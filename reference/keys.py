"""A config.json read key by key: what nobody read is refused, so that nothing is guessed.

Reading a key claims it. Keys that change nothing of what a model computes stand in `CHANGES_NOTHING`, each group with
its reason; a null is a key that is not there. This module must not know what a key means to a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reference.checkpoint import CheckpointError, read_json

CHANGES_NOTHING: dict[str, str] = {
    "about the file": """
        model_type auto_map _name_or_path name_or_path transformers_version torch_dtype dtype torchscript
        _attn_implementation attn_implementation license base_model_name_or_path finetuning_task
        tokenizer_class problem_type id2label label2id task_specific_params use_bfloat16 tf_legacy_loss
        speculators_version verifier unsloth_version unsloth_fixed target_model_type modal_type""",
    "of training": """
        attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop
        attn_pdrop dropout embedding_dropout ffn_dropout hidden_dropout_rate initializer_range init_std
        router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise z_loss_coef gradient_checkpointing
        pretraining_tp ttt_length loss_type""",
    "what is returned, and how its caller caches": """
        use_cache cache_implementation output_router_logits output_attentions output_hidden_states return_dict
        use_return_dict is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
        chunk_size_feed_forward pruned_heads tie_encoder_decoder""",
    "of generation, not of a forward": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id do_sample temperature top_k top_p
        typical_p repetition_penalty length_penalty max_length min_length num_beams num_beam_groups diversity_penalty
        early_stopping no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
        output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix""",
    "which tokens stand for what is no text": """
        image_token_id video_token_id audio_token_id vision_start_token_id vision_end_token_id vision_token_id""",
    "how long a context the model was made for; a rotation that depends on it reads it": """
        max_position_embeddings initial_context_length max_sequence_length seq_length model_max_length""",
}
_NOTHING = frozenset(key for keys in CHANGES_NOTHING.values() for key in keys.split())


class Keys(Mapping[str, Any]):
    """The keys of one object in a config; objects within are Keys too. Whoever reads a key has claimed it."""

    def __init__(self, file: Path, raw: Mapping[str, Any], within: str = "") -> None:
        self.file, self._within = file, within
        self._raw = {
            key: Keys(file, value, f"{within}{key}.") if isinstance(value, dict) else value
            for key, value in raw.items()
            if value is not None
        }
        self._claimed = set[str]()

    @staticmethod
    def read(path: Path) -> Keys:
        """Those of `path`/config.json; CheckpointError if there is none."""
        file = Path(path) / "config.json"
        return Keys(file, read_json(file))

    def __getitem__(self, key: str) -> Any:
        self._claimed.add(key)
        if key not in self._raw:
            raise KeyError(f"{self._within}{key}")
        return self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def refuse(self, key: str, *, but: Any, why: str = "") -> None:
        """CheckpointError unless `key` is absent, or is `but`."""
        if (found := self.get(key, but)) != but:
            words = why or f"this reference builds only {but!r}"
            raise CheckpointError(f"{self.file}: {self._within}{key} is {found!r}; {words}")

    def all_claimed(self) -> None:
        """CheckpointError for a key that nobody read and that is not known to change nothing."""
        for key, value in self._raw.items():
            if key in self._claimed:
                if isinstance(value, Keys):
                    value.all_claimed()
            elif key not in _NOTHING:
                shown = dict(value) if isinstance(value, Keys) else value
                raise CheckpointError(
                    f"{self.file}: {self._within}{key} is {shown!r}; this reference does not know what that changes"
                )

    def __repr__(self) -> str:
        return repr({key: self._raw[key] for key in self._raw})
