"""Shrinks the config of any model of transformers: SIZES has the fields that become small, also in
the configs that it contains, EXCEPTIONS what single configs need."""

import inspect

import transformers

VOCAB_SIZE = 512  # of the tokenizer and of every model
HIDDEN = 64
HEADS = 4
HEAD_SIZE = 16
LAYERS = 4
SIDE = 56  # pixels of an image

NAMES = (
    (
        HIDDEN,
        "hidden_size d_model n_embd dim dim_model embedding_size out_hidden_size "
        "text_hidden_size output_dim input_size backbone_hidden_size word_embed_proj_dim "
        "emb_dim attention_hidden_size lru_width encoder_hidden_size projection_dim "
        "input_embedding_size output_embedding_size vision_output_dim hidden_size_global "
        "projector_hidden_size image_text_hidden_size mamba_d_ssm projector_input_dim "
        "projector_output_dim swa_hidden_size patch_embed_hidden_size adapter_in_dim "
        "adapter_out_dim",
    ),
    (
        96,
        "intermediate_size ffn_hidden_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner "
        "dim_ff dff d_ff mlp_dim d_inner feed_forward_size intermediate_size_mlp "
        "dense_intermediate_size shared_intermediate_size",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size kv_lora_rank "
        "index_head_dim q_lora_rank hidden_size_per_layer_input o_lora_rank hc_lowrank "
        "time_step_rank mamba_dt_rank moe_latent_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers "
        "num_layers_per_stack num_blocks layers",
    ),
    (
        2,
        "depth encoder_layers num_encoder_layers num_key_value_heads num_kv_heads kv_n_heads "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k "
        "sliding_window_pattern _sliding_window_pattern num_global_layers max_window_layers "
        "swa_num_key_value_heads linear_num_key_heads n_groups mamba_n_groups attn_layer_period "
        "expert_layer_period resampler_depth n_mamba_heads",
    ),
    (
        HEADS,
        "num_attention_heads n_head num_heads n_heads decoder_attention_heads attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads linear_num_value_heads index_n_heads num_experts "
        "n_routed_experts num_local_experts moe_num_experts mamba_n_heads mamba_num_heads "
        "zero_expert_num moe_num_experts_per_layer resampler_n_heads",
    ),
    (
        1,
        "n_group topk_group num_expert_group num_limited_groups moe_num_shared_experts "
        "n_shared_experts num_shared_experts moe_layer_start_index first_k_dense_replace "
        "attn_layer_offset num_dense_layers",
    ),
    (
        HEAD_SIZE,
        "head_dim d_kv d_head v_head_dim qk_nope_head_dim swa_head_dim kv_channels dim_head "
        "linear_key_head_dim linear_value_head_dim attention_head_size mamba_d_state "
        "ssm_state_size mamba_head_dim mamba_d_head state_size resampler_head_dim laurel_rank "
        "global_head_dim swa_v_head_dim gated_norm_rank query_pre_attn_scalar",
    ),
    (
        8,
        "qk_rope_head_dim rotary_dim",
    ),
    (
        7,
        "sliding_window sliding_window_size attention_window_size attention_chunk_size "
        "local_attention window_size",
    ),
    (
        VOCAB_SIZE,
        "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size "
        "bigram_vocab_size index_topk keep_window_size",
    ),
    (
        1024,
        "max_position_embeddings n_positions max_seq_len max_target_positions context_length "
        "n_ctx model_max_length max_sequence_length",
    ),
    (
        14,
        "patch_size",
    ),
    (
        SIDE,
        "image_size",
    ),
)
SIZES = {name: size for size, names in NAMES for name in names.split()}
FILLED = (  # given also where the default is None
    "num_key_value_heads",
    "intermediate_size",
    "ffn_hidden_size",
    "head_dim",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_routed_experts",
)
PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
LISTS = {"deepstack_visual_indexes": [0, 1], "image_grid_pinpoints": PINPOINTS}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


# Sizes that divide nothing, and keys and values of different widths: they show what was taken for
# equal because it was so in the small configs. Heads change where their size is a field of its own.
ODD = {
    "intermediate_size": 92,  # of 16 bytes, as grouped products of torch need
    "moe_intermediate_size": 28,
    "v_head_dim": 12,
    "swa_v_head_dim": 12,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "vocab_size": 509,
    "decoder_vocab_size": 509,
    "unpadded_vocab_size": 500,
}
ODD_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12}


def odd_sizes(config_class):
    """Makes configs of the class and of all that it contains odd, from now on; see ODD."""
    known = inspect.signature(config_class.__init__).parameters
    known = {*known, *getattr(config_class, "__dataclass_fields__", ())}
    fixed = EXCEPTIONS.get(config_class.__name__, {})
    has_axes = "mrope_section" in fixed.get("rope_parameters", {})  # of the even heads' channels
    can_change = set(ODD_HEADS) <= known - set(fixed) and not has_axes
    odd = {**ODD, **(ODD_HEADS if can_change else {})}
    if "kv_lora_rank" in known:  # latent attention has as many, and rotates heads of their own size
        odd.pop("head_dim", None)
        if can_change:
            odd["num_key_value_heads"] = odd["num_attention_heads"]
    if "linear_num_key_heads" in fixed:  # each must serve as many heads of values
        odd.pop("linear_num_value_heads")
    own = {name: size for name, size in odd.items() if name in known}
    EXCEPTIONS[config_class.__name__] = own | fixed
    defaults = _default(config_class)
    for name in config_class.sub_configs:
        inner = getattr(defaults, name, None)
        if name == "text_config" and isinstance(inner, transformers.PreTrainedConfig):
            odd_sizes(type(inner))


def shrunk(config_class, **fields):
    """Returns a small config of the class. fields: replace those of the tables."""
    defaults = _default(config_class)
    known = inspect.signature(config_class.__init__).parameters
    known = {*known, *getattr(config_class, "__dataclass_fields__", ())}
    known |= set(config_class.attribute_map)
    given = {}
    for name, size in {**SIZES, **TOKENS}.items():
        if name in known and _is_used(_value(defaults, name, size), name):
            given[name] = size
    for name in config_class.sub_configs:
        inner = getattr(defaults, name, None)
        if isinstance(inner, transformers.PreTrainedConfig):
            own = fields.get(name, {})
            given[name] = shrunk(type(inner), **own).to_dict()
    for name in known:
        value = _value(defaults, name, None)
        is_token = name.endswith(("_token_id", "_token_index"))
        if name not in given and is_token and isinstance(value, int) and value >= VOCAB_SIZE:
            given[name] = 120 + len(given)  # in no prompt of text
    given |= {name: LISTS[name] for name in LISTS if name in known}
    if {"window_size", "patch_size"} <= set(given):
        given["window_size"] = SIDE  # of a vision tower, in pixels
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = HEADS  # latent attention has as many
    given |= EXCEPTIONS.get(config_class.__name__, {})
    given |= {k: v for k, v in fields.items() if k not in config_class.sub_configs}
    return config_class(**given)


def _value(config, name, otherwise):
    try:
        return getattr(config, name, otherwise)
    except Exception:  # it differs between layers
        return otherwise


def _default(config_class):
    try:
        return config_class()
    except Exception:  # some need arguments: they take what the tables have
        return None


def _is_used(value, name):
    """A size that the model leaves out by default stays out, but for the heads and the window."""
    if value is None:
        return name in FILLED
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


ROPE = {"rope_type": "default", "rope_theta": 1e4}
BY_TYPE = {"full_attention": ROPE, "sliding_attention": ROPE}
HYBRID = ["linear_attention", "full_attention"] * 2
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
EXCEPTIONS = {
    "Llama4VisionConfig": {"intermediate_size": 4 * HIDDEN},  # pixels are shuffled four to one
    "MuseGlimmerConfig": {"out_hidden_size": 4 * HIDDEN},  # patches are merged four to one
    "MuseSparkConfig": {"out_hidden_size": 4 * HIDDEN},
    "BambaConfig": {**MAMBA, "attn_layer_indices": [1]},
    "KimiLinearConfig": {"layer_types": HYBRID, "linear_num_heads": HEADS, "linear_head_dim": 16},
    "BailingHybridConfig": {"layer_types": HYBRID},
    "OlmoHybridConfig": {"linear_num_key_heads": HEADS},
    "GraniteMoeHybridConfig": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "FalconH1Config": {**MAMBA, "mamba_d_ssm": 128},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "HeliumConfig": {"head_dim": HEAD_SIZE},  # its o_proj has as many columns as channels
    "HunYuanDenseV1Config": {"head_dim": HEAD_SIZE},
    "HunYuanMoEV1Config": {"head_dim": HEAD_SIZE},
    "MinistralConfig": {"head_dim": HEAD_SIZE},
    "ReformerConfig": {
        "is_decoder": True,
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (16, 16),
        "attn_layers": ["local", "lsh"] * 2,
    },
    "Blip2Config": {"image_token_index": 10},
    "InstructBlipConfig": {"image_token_index": 10},
    "InstructBlipVideoConfig": {"video_token_index": 10},
    "XmodConfig": {"default_language": "en_XX"},
    "MoshiConfig": {"sliding_window": 128},
    "Dots1Config": {"n_shared_experts": 1},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    "ZambaConfig": {
        "num_hidden_layers": 8,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_SIZE,
    },
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "MiniCPMOcrConfig": {"image_token_id": 10, "video_token_id": 11},
    "MiniCPMV4_6Config": {"insert_layer_id": 1, "image_token_id": 10, "video_token_id": 11},
    "MiniCPMV4_7Config": {"insert_layer_id": 1, "image_token_id": 10, "video_token_id": 11},
    "xLSTMConfig": {"qk_dim_factor": 1.0},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "CohereCompassTextConfig": {"rope_parameters": BY_TYPE},
    "Glm4vTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "Qwen2VLTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "Qwen2_5_VLTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "PaddleOCRTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "Qwen2_5OmniTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "GlmOcrTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "Glm4vMoeTextConfig": {
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    },
    "Gemma4Config": {
        "vision_config": {
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_SIZE,
            "position_embedding_size": 1024,
        }
    },
    "Gemma4UnifiedConfig": {
        "vision_config": {"mm_embed_dim": HIDDEN, "output_proj_dims": HIDDEN},
        "audio_config": {},
    },
    "Gemma4UnifiedTextConfig": {"sliding_window": 300},  # an image fits into it
    "Qwen3VLVisionConfig": {"patch_size": 16},
    "Qwen3VLMoeVisionConfig": {"patch_size": 16},
    "Qwen3_5VisionConfig": {"patch_size": 16},
    "Qwen3_5MoeVisionConfig": {"patch_size": 16},
    "Gemma4AssistantConfig": {"text_config": {"hidden_size_per_layer_input": 0}},
    "ChameleonConfig": {
        "vocabulary_map": {
            "<image>": 3,
            **{f"IMGIMG{'ABCDEFGHIJ'[n]}Z": 400 + n for n in range(10)},
        }
    },
    "ChameleonVQVAEConfig": {
        "num_embeddings": 10,
        "base_channels": 32,
        "latent_channels": 32,
        "embed_dim": 32,
        "num_res_blocks": 1,
        "resolution": 64,
    },
    "Emu3Config": {
        "vocabulary_map": {
            "<image>": 3,
            "<|extra_200|>": 399,
            **{f"<|visual token {n:06}|>": 400 + n for n in range(16)},
        }
    },
    "Emu3VQVAEConfig": {
        "codebook_size": 16,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "hidden_size": 32,
        "num_attention_heads": 1,
    },
    "BartConfig": {"encoder_layers": LAYERS},
    "ProphetNetConfig": {"num_encoder_layers": LAYERS},  # its cache has a place for each of these
    "Cosmos3EdgeTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "Ernie4_5_VLMoeTextConfig": {
        "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [32, 16],
    },
    "DeepseekOcr2SamVisionConfig": {  # 48 x 48 patches, since the encoder has 144 queries
        "image_size": 96,
        "patch_size": 2,
        "window_size": 14,
        "global_attn_indexes": [1, 3],
        "output_channels": 32,
        "downsample_channels": [32, HIDDEN],
    },
    "UnlimitedOcrSamVisionConfig": {
        "image_size": 96,
        "patch_size": 2,
        "window_size": 14,
        "global_attn_indexes": [1, 3],
        "output_channels": 32,
        "downsample_channels": [32, HIDDEN],
    },
    "UnlimitedOcrTextConfig": {
        "num_key_value_heads": HEADS,  # its attention repeats none
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
    },
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1)},
    "GotOcr2VisionConfig": {  # 64 x 64 patches, since its processor writes 256 tokens
        "image_size": 128,
        "patch_size": 2,
        "window_size": 14,
        "global_attn_indexes": [3],
        "output_channels": 32,
    },
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[1, 0], [2, 1]],
        "spatial_target_layers": [1, 2, 3, 3],
        "downsample_rate": "1/2",
    },
    "AriaConfig": {  # its processor makes images of 980 pixels
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 980,
            "patch_size": 14,
        }
    },
    "Molmo2VisionConfig": {"image_size": [SIDE, SIDE]},
    "Molmo2AdapterConfig": {"vision_feature_layer": [3, 1]},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_SIZE,
        "indexer_budget": VOCAB_SIZE,
        "indexer_compress_ratio": 4,
    },
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 120},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 120},
    "HunYuanVLTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}},
    "VipLlavaConfig": {"vision_feature_layer": [-2, -1]},
    "Gemma3Config": {"mm_tokens_per_image": 4},
    "T5Gemma2EncoderConfig": {"mm_tokens_per_image": 4},
    "Kimi_K25Config": {"projection_hidden_size": HIDDEN},
    "WavTokenizerEncoderConfig": {"codebook_dim": HIDDEN, "codebook_size": 16},
    "Apertus1p5VisionTokenizerConfig": {
        "codebook_size": 16,
        "embed_dim": 32,
        "latent_channels": 32,
        "base_channels": 32,
        "channel_multiplier": [1] * 5,
        "num_res_blocks": 1,
    },
    "Apertus1p5Config": {"image_token_offset": 400, "audio_token_offset": 416},
    "HYV4VLTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "Glm5NextTextConfig": {"linear_num_heads": HEADS, "linear_head_dim": HEAD_SIZE},
    "NemotronH_Omni_Reasoning_V3_Config": {
        "vision_hidden_size": HIDDEN,
        "image_token_id": 10,
        "video_token_id": 11,
        "audio_token_id": 12,
    },
    "Step3p7TextConfig": {
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "Gemma3nVisionConfig": {"hidden_size": 2048},  # of timm's tower, which has one size
    "FastVlmConfig": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "fastvit_mci3",
            "do_pooling": True,
            "global_pool": "avg",
            "hidden_size": 3072,
            "model_args": {"inference_mode": True},
        }
    },
    "PerceptionLMConfig": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": HIDDEN,
                "img_size": [SIDE, SIDE],
                "depth": 2,
                "num_heads": HEADS,
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
                "ref_feat_shape": [SIDE // 14, SIDE // 14],
            },
        }
    },
    "LongcatFlashConfig": {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 8},  # of rope
    "DoryConfig": {"n_input_layers": 2, "n_output_layers": 2, "num_hidden_layers": 8},
    "HrmTextConfig": {"num_layers_per_stack": None, "num_hidden_layers": 2},
    "RadioConfig": {"video_temporal_patch_size": 2},
    "Dots3NoteAudioConfig": {"adapter_input_size": HIDDEN},
    "Dots3NoteVisionConfig": {"mlp_layer_types": ["dense", "sparse"] * 2},
}
