"""Shrinks a configuration class of `transformers` to a model of a few thousand parameters.

The size of a field follows from its name, so that a new architecture needs no entry here. Fields that must fit each
other in another way are in `overrides.py`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import PretrainedConfig

from zoo.overrides import FIELDS

VOCABULARY = 128
"""Tokens of text; special tokens of configurations lie behind the first `TEXT`."""
TEXT = 100
WIDTH, HEADS, LAYERS, IMAGE, PATCH, POSITIONS = 32, 4, 4, 32, 8, 64
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
_UNSET = frozenset({"forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens"})
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
"""Rotary embeddings in three axes, for heads of size WIDTH // HEADS."""
_DEEPEST = 4
"""Levels of configurations in configurations."""

SIZES: tuple[tuple[str, int], ...] = (
    (r"rotary_dim|(mamba_)?num_heads|mamba_n_heads|mamba_d_head|mamba_head_dim|mamba_num_heads", 8),
    (r"(\w*_)?vocab_size(_per_layer_input)?|n_words", VOCABULARY),
    (r"(text_|encoder_|decoder_)?(num_hidden_layers|num_layers|n_layers?|layers)", LAYERS),
    (r"num_(encoder|decoder)_(blocks|layers)|(encoder|decoder)_num_hidden_layers|\w+_depth|depth|num_blocks", 2),
    (r"\w+_num_(hidden_)?layers|num_\w*_layers", 2),
    (
        r"(\w*num_)?(attention_heads|heads|attn_heads|n_heads?)|(en|de)coder_attention_heads|\w+_num_(attention_)?heads",
        HEADS,
    ),
    (r"n_heads?|\w*num_attention_heads|cross_attention_num_heads", HEADS),
    (r"(\w*_)?num_(key_value_heads|kv_heads|global_key_value_heads)|n_head_kv|multi_query_group_num", 2),
    (
        r"(global_|swa_)?head_dim|attention_head_size|d_kv|d_head|kv_channels|dim_head|\w+_head_dim|dim_per_head",
        WIDTH // HEADS,
    ),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|hidden_dim|hidden_size_per_layer_input", WIDTH),
    (
        r"\w+_(hidden_size|hidden_dim|embed_dim|embedding_size|dim|dims)|word_embed_proj_dim|q_lora_rank|kv_lora_rank",
        WIDTH,
    ),
    (r"embedding_dim|out_features|model_dim|projector_dim|attention_hidden_size|encoder_hidden_size|lru_width", WIDTH),
    (r"(\w*_)?(intermediate_size|ffn_dim|d_ff|d_inner|n_inner|mlp_dim|ffn_hidden_size)|filter_size", 2 * WIDTH),
    (r"(\w*_)?intermediate_dim|feed_forward_proj_dim|feedforward_dim|dim_feedforward", 2 * WIDTH),
    (
        r"(\w*_)?(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|seq_length|n_ctx)|max_(source|target)_positions",
        POSITIONS,
    ),
    (r"(pretrain_|vision_)?image_size|input_size", IMAGE),
    (r"patch_size|encoder_stride|(\w+_)?patch_stride", PATCH),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts", 4),
    (r"(num_)?experts_per_tok|num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts|moe_top_k", 2),
    (r"n_group|topk_group|num_expert_groups?|first_k_dense_replace|n_shared_experts|num_shared_experts", 1),
    (r"num_mel_bins|feature_size|num_codebooks", 16),
    (r"sliding_window|attention_window|local_attention|attention_chunk_size|chunk_size|mamba_chunk_size", 8),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size|mamba_d_state", 8),
    (r"(\w*num_)?(query_tokens|queries|latents)|resampler_n_latents", 4),
    (r"num_conv_pos_embeddings", 8),
    (r"conv_depthwise_kernel_size", 7),
    (r"num_conv_pos_embedding_groups|(mamba_)?n_groups|num_groups", 2),
    (r"num_frames|tubelet_size|temporal_patch_size", 2),
    (r"index_topk", 4),
    (r"fusion_hidden_size|\w*_channels_dim|conv_dim|tdnn_dim|codevector_dim|xvector_output_dim", WIDTH),
)
"""Pattern of a field's name, size. The first that matches holds."""
_PATTERNS = tuple((re.compile(pattern), size) for pattern, size in SIZES)
_COUNTS = re.compile(r"depths|num_blocks|num_block_repeats|layers_per_\w+|num_(hidden_)?layers|stage_\w*blocks")
_WIDTHS = re.compile(r"\w*(hidden_sizes|embed_dims?|channels|conv_dim|dims|tdnn_dim|hidden_dims?)")
_HEADS = re.compile(r"num_(attention_)?heads|\w*num_heads")
_TOKEN = re.compile(r"\w*token_(id|index)|\w*_token|img_\w*_id|ignore_id")


def size_of(name: str) -> int | None:
    return next((size for pattern, size in _PATTERNS if pattern.fullmatch(name)), None)


def tiny(kind: type[PretrainedConfig], model: str = "") -> PretrainedConfig:
    """Return a small configuration of class `kind`. model: name of the class that it is for."""
    return kind(**{**_values(kind, _Tokens(), _DEEPEST), **FIELDS.get(model, {})})


class _Tokens:
    """Numbers of special tokens: by name, so that parts of a configuration agree."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        key = name.replace("_token_index", "_token_id")
        return self._numbers.setdefault(key, TEXT + len(self._numbers) % (VOCABULARY - TEXT))


def _values(kind: type[PretrainedConfig], tokens: _Tokens, depth: int) -> dict[str, Any]:
    try:
        example: PretrainedConfig | None = kind()
    except Exception:  # noqa: BLE001 - some have no valid default
        example = None
    values: dict[str, Any] = {}
    is_grouped = example is None or _has_groups(example)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        default = field.default
        present = example.__dict__.get(field.name) if example is not None else default
        if isinstance(present, PretrainedConfig):
            if depth:
                values[field.name] = type(present)(**_values(type(present), tokens, depth - 1))
        else:
            _shrink(values, field.name, present, default, tokens)
    if not is_grouped and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS
    if "mrope_section" in kind.ignore_keys_at_rope_validation:
        values["rope_parameters"] = dict(_ROTARY)  # configurations add to it
    return {**values, **FIELDS.get(kind.model_type, {})}


def _has_groups(config: PretrainedConfig) -> bool:
    """Return whether several heads share keys and values by default; some attentions do not support it."""
    values = config.__dict__
    return values.get("num_key_value_heads") != values.get("num_attention_heads")


def _shrink(values: dict[str, Any], name: str, present: Any, default: Any, tokens: _Tokens) -> None:
    if name in _UNSET:
        values[name] = None
    elif name in _SPECIAL:
        values[name] = _SPECIAL[name]
    elif _TOKEN.fullmatch(name) and isinstance(present, int) and not isinstance(present, bool):
        values[name] = tokens.number(name)
    elif "drop" in name and isinstance(present, float):
        values[name] = 0.0
    elif isinstance(present, (list, tuple)):
        shrunk = _shrunk_list(name, present) if isinstance(default, (list, tuple)) else None
        if shrunk is not None:
            values[name] = type(present)(shrunk)
    elif isinstance(present, int) and not isinstance(present, bool):
        size = size_of(name)
        if size is not None and (present > 0 or "vocab" in name) and (default is not None or "head" not in name):
            values[name] = min(size, present) if present else size


def _shrunk_list(name: str, present: Any) -> list[Any] | None:
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in present):
        return None
    if _COUNTS.fullmatch(name):
        return [1 for _ in present]
    if _WIDTHS.fullmatch(name):
        return [each if each <= 3 else max(16, each // 16 // 8 * 8) for each in present]
    if _HEADS.fullmatch(name):
        return [2 for _ in present]
    if name == "image_size":
        return [IMAGE for _ in present]
    return None
