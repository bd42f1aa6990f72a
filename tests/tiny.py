"""Tiny models of transformers with random weights, from the library's own registry.

What a configuration has of the names in ``SMALL`` is set so, in parts of it too; what a
family needs beside that stands in ``FAMILIES``. ``build`` makes a model of any class
that the auto classes map.
"""

import copy
import inspect
import re

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

V = 32
TASKS = {
    "causal-lm": "CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "image-classification": "IMAGE_CLASSIFICATION",
}
# What a configuration has of these names, it gets; by value.
_BY_VALUE = {
    0: """
    pad_token_id num_mtp_layers num_nextn_predict_layers
    """,
    1: """
    num_key_value_heads bos_token_id num_hidden_groups decoder_start_token_id
    post_attention_groups intermediate_groups output_groups num_feature_levels
    n_shared_experts num_shared_experts moe_num_shared_experts topk_group
    first_k_dense_replace num_dense_layers swa_num_key_value_heads n_groups
    """,
    2: """
    num_hidden_layers num_attention_heads eos_token_id num_filters n_layer n_layers
    num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers
    n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
    type_vocab_size q_groups k_groups v_groups mlp_ratio num_experts_per_tok moe_topk
    moe_k top_k_experts n_group index_n_heads swa_num_attention_heads
    linear_num_key_heads linear_num_value_heads linear_num_heads linear_conv_kernel_dim
    mamba_d_conv mamba_expand mamba_dt_rank time_step_rank
    """,
    3: """
    blank_token_id num_labels num_channels
    """,
    4: """
    sliding_window attention_window block_size rotary_dim num_query_tokens patch_size
    num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim
    qk_nope_head_dim index_topk linear_key_head_dim linear_value_head_dim mamba_n_heads
    mamba_d_state mamba_chunk_size mamba_num_heads state_size ssm_state_size chunk_size
    hidden_size_per_layer_input
    """,
    6: """
    expert_ffn_hidden_size
    """,
    8: """
    head_dim d_kv num_buckets relative_attention_num_buckets num_mel_bins
    moe_intermediate_size kv_lora_rank q_lora_rank v_head_dim index_head_dim
    swa_head_dim linear_head_dim mamba_d_head mamba_head_dim
    """,
    10: """
    shared_expert_intermediate_size shared_experts_intermediate_size
    shared_intermediate_size
    """,
    12: """
    intermediate_size hidden_dim d_inner d_ff n_inner ffn_dim dim_feedforward
    encoder_ffn_dim decoder_ffn_dim decoder_intermediate_size feed_forward_size
    ffn_hidden_size
    """,
    16: """
    hidden_size d_model dim n_embd embed_dim emb_dim embedding_size encoder_hidden_size
    decoder_hidden_size attention_hidden_size word_embed_proj_dim projection_dim
    audio_hidden_size hidden_size_global relative_attention_max_distance image_size
    """,
    64: """
    max_position_embeddings n_positions n_ctx max_seq_len max_source_positions
    max_target_positions
    """,
}
SMALL = {name: n for n, names in _BY_VALUE.items() for name in names.split()}
SMALL.update(
    vocab_size=V,
    vocab_size_per_layer_input=V,
    mlp_layer_types=["dense", "sparse"],
    enable_moe_block=True,
)
LATENT = dict(num_key_value_heads=2, head_dim=4)
LINEAR = ["linear_attention", "full_attention"]


def rope(*section, **kwargs):
    given = dict(rope_type="default", rope_theta=1e4, mrope_section=list(section))
    return dict(rope_parameters={**given, **kwargs})


STAGES = dict(hidden_sizes=(8, 16), depths=(1, 1))
TWO_STAGES = dict(
    STAGES,
    num_encoder_blocks=2,
    sr_ratios=(2, 1),
    sequence_reduction_ratios=(2, 1),
    patch_sizes=(3, 3),
    strides=(2, 2),
    padding=(1, 1),
    num_attention_heads=(1, 2),
    mlp_ratios=(2, 2),
)
SWIN = dict(embed_dim=8, depths=(2, 1), num_heads=(1, 2), window_size=2, patch_size=2)
FAMILIES = {
    "axk1": LATENT,
    "axk2": LATENT,
    "beam": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
    "dbrx": dict(attn_config=dict(kv_n_heads=1, clip_qkv=8.0, rope_theta=10000.0)),
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": dict(
        mlp_layer_types=["hash_moe", "moe"],
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates=dict(
            compressed_sparse_attention=2, heavily_compressed_attention=4
        ),
        o_lora_rank=4,
    ),
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "jetmoe": dict(kv_channels=8),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "longcat_flash": dict(zero_expert_num=2, num_key_value_heads=2, head_dim=4),
    "mistral4": LATENT,
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        num_hidden_layers=4,
        moe_shared_expert_intermediate_size=6,
    ),
    "sarvam_mla": LATENT,
    "qwen3_5_moe": dict(layer_types=LINEAR, **rope(2, 1, 1, partial_rotary_factor=1.0)),
    "qwen3_next": dict(layer_types=LINEAR),
    "qwen4_exp": dict(hc_lowrank=4),
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=8),
    "qwen3_5_text": dict(layer_types=LINEAR),
    "gemma4_assistant": dict(
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        enable_moe_block=False,
    ),
    "neomme": dict(head_dim=16),
    "zamba": dict(
        num_hidden_layers=5,
        layers_block_type=["linear_attention"] * 2
        + ["hybrid", "linear_attention", "hybrid"],
        attention_hidden_size=32,
    ),
    "funnel": dict(block_sizes=(1, 1), d_head=8),
    "bit": dict(STAGES, num_groups=2),
    "blt": dict(encoder_hash_byte_group_vocab=64),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=10000.0)
            for kind in ("sliding_attention", "full_attention")
        },
    ),
    "convnext": dict(STAGES, num_stages=2),
    "convnextv2": dict(STAGES, num_stages=2),
    "cvt": dict(depth=(1, 2, 3)),
    "donut-swin": SWIN,
    "efficientnet": dict(width_coefficient=0.25, hidden_dim=320, in_channels=(32, 16)),
    "focalnet": dict(STAGES),
    "falcon_h1": dict(mamba_d_ssm=32),
    "gemma3n_text": dict(
        intermediate_size=[12, 12],
        activation_sparsity_pattern=[0.5, 0.0],
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "hiera": dict(
        depths=(1, 1),
        patch_padding=(1, 1),
        num_query_pool=1,
        masked_unit_size=(4, 4),
        masked_unit_attention=(True, False),
    ),
    "hgnet_v2": dict(
        hidden_sizes=(8, 16),
        stem_channels=(3, 4, 8),
        stage_in_channels=(8, 8),
        stage_mid_channels=(4, 4),
        stage_out_channels=(8, 16),
        stage_num_blocks=(1, 1),
        stage_downsample=(False, True),
        stage_light_block=(False, True),
        stage_kernel_size=(3, 3),
        stage_numb_of_layers=(1, 1),
    ),
    "fsmt": dict(src_vocab_size=V, tgt_vocab_size=V),
    "markuplm": dict(xpath_unit_hidden_size=4, max_depth=4),
    "mobilenet_v1": dict(depth_multiplier=0.25),
    "mobilenet_v2": dict(depth_multiplier=0.1),
    "roc_bert": dict(shape_vocab_size=8, pronunciation_embed_dim=4),
    "textnet": dict(
        stem_out_channels=8,
        hidden_sizes=(8, 8, 8, 16, 16),
        conv_layer_strides=[[1], [2], [1], [2]],
    ),
    "layoutlmv3": dict(visual_embed=False, coordinate_size=2, shape_size=4),
    "levit": dict(hidden_sizes=(8, 16, 16), key_dim=(4, 4, 4)),
    "lilt": dict(hidden_size=24),
    "luke": dict(entity_vocab_size=16),
    "mamba2": dict(num_heads=4),
    "minicpm3": LATENT,
    "mobilevit": dict(
        image_size=64, hidden_sizes=(16, 16, 16), neck_hidden_sizes=(8,) * 7
    ),
    "mobilevitv2": dict(
        base_attn_unit_dims=(8, 8, 8), width_multiplier=0.25, patch_size=1
    ),
    "mpnet": dict(relative_attention_num_buckets=32),
    "perceiver": dict(
        d_latents=16, num_self_attends_per_block=1, num_cross_attention_heads=1
    ),
    "poolformer": TWO_STAGES,
    "pvt": dict(TWO_STAGES, patch_sizes=(4, 2), strides=(4, 2)),
    "pvt_v2": TWO_STAGES,
    "reformer": dict(
        axial_pos_embds=False,
        attn_layers=["local", "lsh"],
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        attention_head_size=8,
    ),
    "regnet": dict(STAGES),
    "resnet": dict(STAGES),
    "segformer": dict(TWO_STAGES),
    "swiftformer": dict(depths=(1, 1), embed_dims=(8, 16)),
    "swin": SWIN,
    "swinv2": SWIN,
    "xmod": dict(default_language="en_XX"),
    "youtu": LATENT,
}


def classes():
    """Every (task, family, class) that the auto classes map, by name."""
    for task, name in TASKS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
        for family, found in names.items():
            for cls in [found] if isinstance(found, str) else found:
                yield task, family, cls


_RANDOM = re.compile("drop(?!_path_type)|jitter|layerdrop|pdrop")


def _fitting(value, default):
    """The value in the form of the default: as many, as whole numbers."""
    if isinstance(default, (list, tuple)) and not isinstance(value, (list, tuple)):
        return type(default)(_fitting(value, x) for x in default)
    if isinstance(value, bool) or isinstance(default, bool):
        return value
    if isinstance(value, (int, float)) and isinstance(default, (int, float)):
        return type(default)(value)
    return value


def config_of(config_class, family, extra=()):
    """A small configuration; its parts are small too."""
    try:
        default = config_class()
    except Exception:  # some can't do without arguments
        default = None
    known = dict(inspect.signature(config_class.__init__).parameters)
    for cls in config_class.__mro__:
        known.update(vars(cls).get("__annotations__", {}))
    given = {
        name: _fitting(value, vars(default or object).get(name))
        for name, value in SMALL.items()
        if name in known
    }
    for name, part in vars(default).items() if default is not None else ():
        if _RANDOM.search(name) and isinstance(part, (int, float, tuple, list)):
            given[name] = False if isinstance(part, bool) else _fitting(0, part)
        if isinstance(part, transformers.PreTrainedConfig):
            small = config_of(type(part), type(part).model_type, extra)
            given[name] = small.to_dict()
    for values in (FAMILIES.get(family, {}), dict(extra)):
        given.update((k, v) for k, v in values.items() if k in known or k in given)
    return config_class(**given)


# What some architectures ask for in addition; the first that gives a model is taken.
WAYS = [
    {},
    dict(num_key_value_heads=2),
    dict(num_key_value_heads=2, head_dim=4),
    dict(layer_types=["full_attention", "full_attention"]),
    dict(layer_types=["sliding_attention", "full_attention"]),
    dict(layer_types=["linear_attention", "full_attention"]),
    dict(num_hidden_layers=4),
    dict(num_hidden_layers=2, layers_block_type=["mamba", "hybrid"], num_mem_blocks=1),
]


def build(task, family, cls, **kwargs):
    """A model of the class ``cls``, its parameters away from zeros and ones."""
    model_class = getattr(transformers, cls)
    errors = []
    for way in WAYS:
        try:
            config_class = CONFIG_MAPPING[family]
            if not issubclass(config_class, model_class.config_class):
                config_class = model_class.config_class  # of the text part
            config = config_of(config_class, family, {**way, **kwargs})
            config._attn_implementation = "eager"
            if task == "causal-lm" and hasattr(config, "is_decoder"):
                config.is_decoder = True
            if family == "encoder-decoder":  # or the decoder sees no encoder
                config.decoder.is_decoder = config.decoder.add_cross_attention = True
            with torch.device("meta"):
                probe = model_class(copy.deepcopy(config))
            size = sum(p.numel() for p in probe.parameters())
            if size > 1e7:
                raise ValueError(f"large: {size:,} parameters")
            torch.manual_seed(3)
            model = model_class(config)
            break
        except Exception as error:
            errors.append(error)
    else:
        raise errors[0]
    for part in model.modules():  # the kernels have no float64
        if getattr(part, "_can_set_experts_implementation", bool)():
            part.set_experts_implementation("eager")
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.train()
