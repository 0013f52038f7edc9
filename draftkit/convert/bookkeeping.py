"""Config keys that transformers writes into any config and that say nothing about what a draft computes.

They are the attributes that its base class `PretrainedConfig` sets or writes, in the source of releases 4.28, 4.57,
5.19 and 5.23 (`configuration_utils.py`; the defaults of generation, which it once had too, in
`generation/configuration_utils.py`), and of `LlamaConfig` those that the tensors tell better. Attributes that change
the layers (`quantization_config`, `per_layer_config`) are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping

_BY_REASON = {
    "used in training only": (
        "attention_dropout",
        "gradient_checkpointing",
        "initializer_range",
        "task_specific_params",
    ),
    "names the target's class or family; the tensors tell the format": ("architectures", "model_type"),
    "a name, path or version on the author's side": (
        "_commit_hash",
        "_name_or_path",
        "name_or_path",
        "tokenizer_class",
        "transformers_version",
    ),
    "how transformers finds and loads a class, which draftkit does not use": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_auto_class",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_output_attentions",
        "_post_init_done",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "tf_legacy_loss",
        "torchscript",
        "use_bfloat16",
        "xla_device",
    ),
    "the tensors tell which projections have a bias": ("attention_bias", "mlp_bias"),
    "the target's tokenizer decides": (
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "prefix",
        "sep_token_id",
    ),
    "the tensors tell the dtype": ("_pre_quantization_dtype", "dtype", "torch_dtype"),
    "splits a computation without changing it": ("chunk_size_feed_forward", "pretraining_tp"),
    "the tensors tell whose embedding and head the draft uses": ("tie_word_embeddings",),
    "no effect on what the layers compute": (
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tie_last_hidden_states",
        "use_cache",
    ),
    "of encoders and decoders, which no class of this family reads": (
        "add_cross_attention",
        "cross_attention_hidden_size",
        "is_decoder",
        "is_encoder_decoder",
        "tie_encoder_decoder",
    ),
    "of classifiers": ("finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
    "the tensors are there without the heads": ("pruned_heads",),
    "a default of generation": (
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ),
}
BOOKKEEPING: Mapping[str, str] = {key: reason for reason, keys in _BY_REASON.items() for key in keys}  # key → reason
