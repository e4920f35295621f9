"""Read a transformers config into a DecoderConfig. Configs that are not known here are left to transformers.

dense.py, mixtures.py and recurrent_families.py say in which settings each family differs from the common ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsbd_cli.errors import one_line
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.dense import DENSE, UnfitError, common_settings
from dsbd_cli.models.decoder.mixtures import MIXTURES
from dsbd_cli.models.decoder.recurrent_families import RECURRENT, RECURRENT_KEYS, WITHOUT_ATTENTION, without_attention

# Keys that a config declares and that do not change what a forward computes, or that are read below.
KNOWN = (
    frozenset(
        """
    architectures attention_bias attention_dropout attention_multiplier attn_logit_softcapping bos_token_id
    chunk_size_feed_forward classifier_dropout cls_token_id decoder_start_token_id dtype embd_pdrop embedding_multiplier
    eos_token_id
    final_logit_softcapping forced_bos_token_id forced_eos_token_id gradient_checkpointing head_dim hidden_act
    hidden_activation hidden_size id2label initializer_range intermediate_size is_decoder is_encoder_decoder label2id
    layer_types logits_scaling max_length max_position_embeddings max_window_layers mlp_bias model_type name_or_path
    no_rope_layer_interval no_rope_layers num_attention_heads num_hidden_layers num_key_value_heads
    original_max_position_embeddings output_attentions output_hidden_states output_router_logits pad_token_id
    partial_rotary_factor pretraining_tp problem_type query_pre_attn_scalar residual_multiplier resid_pdrop return_dict
    rms_norm_eps rope_local_base_freq rope_parameters rope_scaling rope_theta sep_token_id sliding_window
    sliding_window_pattern tie_word_embeddings task_specific_params tokenizer_class torch_dtype transformers_version
    unsloth_fixed unsloth_version use_bidirectional_attention use_cache use_sliding_window vocab_size
    attention_out_bias residual_dropout cache_implementation
    clip_qkv decoder_sparse_step first_k_dense_replace mlp_layer_types mlp_only_layers moe_intermediate_size n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts num_experts_per_tok num_local_experts
    num_nextn_predict_layers num_shared_experts qkv_bias routed_scaling_factor router_aux_loss_coef router_jitter_noise
    shared_expert_intermediate_size shared_intermediate_size topk_group use_qk_norm
    enable_moe_fp32_combine layer_rope_theta mtp_layer_types mtp_mlp_layer_types num_mtp_layers router_scaling_factor
    num_dense_layers swiglu_alpha swiglu_limit use_expert_bias
    moe_k moe_layer_end_index moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts
    moe_num_shared_experts moe_topk
    eod_token_id use_bias use_post_norm
    """.split()
    )
    | RECURRENT_KEYS
)
FAMILIES = DENSE.keys() | MIXTURES.keys() | RECURRENT.keys()


def decoder_config_of(config: Any) -> DecoderConfig | str:
    """Return the DecoderConfig of a transformers (text) config, or the reason why there is none."""
    family, text = config.model_type, config.get_text_config(decoder=True)
    if family not in FAMILIES and text is not config and not getattr(config, "is_encoder_decoder", False):
        decoder_config = decoder_config_of(text)
        if isinstance(decoder_config, str):
            return f"{family} is no standard decoder that is known here: {decoder_config}"
        return replace(decoder_config, tied=bool(getattr(config, "tie_word_embeddings", decoder_config.tied)))
    if family not in FAMILIES:
        return f"{family} is no standard decoder that is known here"
    # a key that transformers' class does not declare changes nothing there
    declared, changed = type(config)().to_dict(), config.to_diff_dict()
    stated = {key for key in changed if key in declared and key[0] != "_" and not _idle(changed[key])}
    strange = sorted(stated - KNOWN)
    if strange:
        return f"its config says {strange[0]} = {changed[strange[0]]!r}, which is not known here"
    try:
        shared = (
            without_attention(config) if family in WITHOUT_ATTENTION else common_settings(config, family in RECURRENT)
        )
        own = RECURRENT[family](config, shared) if family in RECURRENT else {**DENSE, **MIXTURES}[family](config)
        return DecoderConfig(**{**shared, **own})
    except UnfitError as error:
        return str(error)
    except Exception as error:  # settings of wrong types, for transformers to refuse
        return f"its config cannot be read ({type(error).__name__}: {one_line(error)})"


def _idle(value: object) -> bool:
    """Return whether a setting is off or empty."""
    return value is None or value is False or value in ("", [], {}, ())
