"""Tiny checkpoints of families with sounds that transformers_any serves, and their processors."""

import numpy as np
import transformers

from mmdeploy_llm.testing.tiny import Family, text_config

RATE = 16000
CHUNK = 2  # seconds
WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "sampling_rate": RATE,
    "hop_length": 160,
    "chunk_length": CHUNK,
    "n_fft": 400,
    "padding_value": 0.0,
}
TOWER = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "d_model": 32,
    "max_source_positions": 100,
}
LLAMA_LIKE = {
    "num_mel_bins": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "hidden_size": 32,
    "max_source_positions": 100,
}
TEMPLATE = (
    "{%%- for m in messages -%%}{{- '<|im_start|>' ~ m.role ~ '\\n' -}}"
    "{%%- if m.content is string -%%}{{- m.content -}}{%%- else -%%}{%%- for p in m.content -%%}"
    "{%%- if p.type == 'audio' -%%}{{- '%s' -}}{%%- else -%%}{{- p.text -}}{%%- endif -%%}"
    "{%%- endfor -%%}{%%- endif -%%}{{- '<|im_end|>\\n' -}}{%%- endfor -%%}"
    "{%%- if add_generation_prompt -%%}{{- '<|im_start|>assistant\\n' -}}{%%- endif -%%}"
)


def text(tokenizer, model_type, options, **fields):
    return {"model_type": model_type, **text_config(tokenizer, options, **fields)}


def family(architecture, marker, make_config, extractor, processor, special=()):
    return Family(
        architecture=architecture,
        make_config=make_config,
        chat_template=TEMPLATE % marker,
        special_tokens=special,
        files={
            "preprocessor_config.json": {
                **extractor,
                "processor_class": processor["processor_class"],
            },
            "processor_config.json": processor,
        },
    )


def qwen2_audio(tokenizer, options):
    return transformers.Qwen2AudioConfig(
        text_config=text(tokenizer, "qwen2", options),
        audio_config={"model_type": "qwen2_audio_encoder", **TOWER},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )


def voxtral(tokenizer, options):
    return transformers.VoxtralConfig(
        text_config=text(tokenizer, "llama", options, head_dim=16),
        audio_config={"model_type": "voxtral_encoder", **LLAMA_LIKE},
        audio_token_id=tokenizer.convert_tokens_to_ids("[AUDIO]"),
    )


def granite_speech(tokenizer, options, kind="GraniteSpeech", **encoder):
    return getattr(transformers, f"{kind}Config")(
        text_config=text(tokenizer, "granite", options),
        encoder_config={
            "model_type": "granite_speech_encoder",
            "input_dim": 160,
            "num_layers": 2,
            "hidden_dim": 32,
            "num_heads": 2,
            "dim_head": 16,
            "output_dim": 20,
            "context_size": 20,
            "max_pos_emb": 64,
            **encoder,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "encoder_hidden_size": 32 * (1 + len(encoder.get("cat_hidden_layers", ()))),
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
    )


def granite_speech_plus(tokenizer, options):
    """Its projector reads the states of several layers of the encoder."""
    encoder = {"model_type": "granite_speech_plus_encoder", "cat_hidden_layers": [0, 1]}
    return granite_speech(tokenizer, options, "GraniteSpeechPlus", **encoder)


GRANITE = (
    {
        "feature_extractor_type": "GraniteSpeechFeatureExtractor",
        "sampling_rate": RATE,
        "melspec_kwargs": {"sample_rate": RATE, "n_mels": 80},
    },
    {"processor_class": "GraniteSpeechProcessor", "audio_token": "<|audio|>"},
    ("<|audio|>",),
)


def audioflamingo3(tokenizer, options):
    return transformers.AudioFlamingo3Config(
        text_config=text(tokenizer, "qwen2", options),
        audio_config={"model_type": "audioflamingo3_encoder", **LLAMA_LIKE},
        audio_token_id=tokenizer.convert_tokens_to_ids("<sound>"),
    )


def glmasr(tokenizer, options):
    return transformers.GlmAsrConfig(
        text_config=text(tokenizer, "llama", options),
        audio_config={
            "model_type": "glmasr_encoder",
            **LLAMA_LIKE,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|sound_pad|>"),
    )


AUDIO_BOX = "<|audio_bos|><|AUDIO|><|audio_eos|>"
FAMILIES = {
    "qwen2_audio": family(
        "Qwen2AudioForConditionalGeneration",
        AUDIO_BOX,
        qwen2_audio,
        WHISPER,
        {"processor_class": "Qwen2AudioProcessor"},
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    ),
    "voxtral": family(
        "VoxtralForConditionalGeneration",
        "[BEGIN_AUDIO][AUDIO]",
        voxtral,
        WHISPER,
        {"processor_class": "VoxtralProcessor"},
        ("[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"),
    ),
    "granite_speech": family(
        "GraniteSpeechForConditionalGeneration",
        "<|audio|>",
        granite_speech,
        *GRANITE,
    ),
    "granite_speech_plus": family(
        "GraniteSpeechPlusForConditionalGeneration",
        "<|audio|>",
        granite_speech_plus,
        *GRANITE,
    ),
    "audioflamingo3": family(
        "AudioFlamingo3ForConditionalGeneration",
        "<sound>",
        audioflamingo3,
        WHISPER,
        {"processor_class": "AudioFlamingo3Processor", "max_audio_len": 6},
        ("<sound>",),
    ),
    "glmasr": family(
        "GlmAsrForConditionalGeneration",
        "<|sound_pad|>",
        glmasr,
        WHISPER,
        {
            "processor_class": "GlmAsrProcessor",
            "audio_token": "<|sound_pad|>",
            "max_audio_len": 6,
        },
        ("<|sound_pad|>",),
    ),
}


def sound(seconds, seed=0):
    """Returns float32 samples at RATE."""
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    return values.astype(np.float32)
