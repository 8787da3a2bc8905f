"""Fields of configurations that names do not decide: sizes that must fit each other."""

from __future__ import annotations

from typing import Any

_HEAD = {"head_dim": 8}
FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("hunyuan_v1_dense", "ministral"), _HEAD),
    "hunyuan_v1_moe": {**_HEAD, "num_experts": 4, "moe_topk": 2},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "Gemma4ForCausalLM": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "step3p5": {"sliding_window": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": None, "topk_group": None},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "num_buckets": 4,
    },
    "esm": {"vocab_size": 128, "mask_token_id": 101, "pad_token_id": 1},
    **{key: {"decoder_start_token_id": 1} for key in ("t5", "longt5")},
    "switch_transformers": {"decoder_start_token_id": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "esmc": {"vocab_size": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "blenderbot": {"num_hidden_layers": 2},
    **{key: {"num_codebooks": 1} for key in ("musicgen_decoder", "musicgen_melody_decoder")},
    "beit": {"out_indices": [1, 2, 3, 4]},
    **{key: {"is_decoder": False} for key in ("ReformerForMaskedLM", "ReformerForSequenceClassification")},
    **{key: {"window_size": 2, "patch_size": 4} for key in ("swin", "donut-swin", "swinv2")},
    **{key: {"use_cache": False} for key in ("bailing_hybrid", "kimi_linear")},
    "glm4v_moe_text": {"head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
    "perceiver": {
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "qk_channels": 32,
        "v_channels": 32,
        "num_self_attends_per_block": 2,
        "max_position_embeddings": 64,
        "num_cross_attention_heads": 4,
        "num_self_attention_heads": 4,
    },
}
"""model_type, or name of a class → field → value."""
