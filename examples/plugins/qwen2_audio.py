"""Qwen2-Audio as a plugin of one file: transformers' feature extractor and encoder, a projection,
and a Qwen2 decoder."""

from dataclasses import replace

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

# From the published names, and those of transformers' modules, to those of the layers.
RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^model\.(audio_tower|multi_modal_projector)\.", r"\1."),
    (r"^multi_modal_projector\.linear\.", "projector."),
)


@hookimpl
def provide_models():
    """Lists the family. Whoever lists plugins imports this file, so torch is imported below."""
    return [
        ModelSpec(
            name="qwen2-audio-of-one-file",
            architectures=("Qwen2AudioForConditionalGeneration",),
            factory=f"{__name__}:build",
            media=("audio",),
            priority=1,  # the built-in plugins serve it below
        )
    ]


@hookimpl
def provide_media_processors():
    """Lists the processor of sounds."""
    return [
        MediaProcessorSpec(
            name="qwen2-audio-of-one-file-audio",
            kind="audio",
            factory=f"{__name__}:sounds",
            models=("qwen2-audio-of-one-file",),
        )
    ]


def sounds(checkpoint, options):
    """Builds the processor of sounds."""
    from mmdeploy_llm_processors.from_transformers import TransformersSounds

    class Sounds(TransformersSounds):
        """Spectrograms of a fixed length, whose silence at the end has no tokens."""

        token = "<|AUDIO|>"
        markers = (token,)
        tensors = ("input_features", "attention_mask")
        arguments = {"return_attention_mask": True, "padding": "max_length"}

        def num_tokens(self, made):
            """Returns half of the frames that the convolutions leave."""
            return (num_frames(made["attention_mask"]) - 2) // 2 + 1

    return Sounds(checkpoint, options)


def num_frames(mask):
    """Returns how many frames of a sound the convolutions leave; the others are padding."""
    return (int(mask.sum()) - 1) // 2 + 1


def build(config):
    """Builds the model of a config of transformers."""
    import torch
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

    from mmdeploy_llm.layers import CausalLM, Linear, standard_decoder
    from mmdeploy_llm.weights.map import WeightMap

    class Qwen2Audio(CausalLM):
        """The tower, the projection and the decoder."""

        def __init__(self):
            decoder = standard_decoder(config.text_config, own=())
            super().__init__(replace(decoder, qkv_bias=True))
            self.audio_tower = Qwen2AudioEncoder._from_config(
                config.audio_config, attn_implementation="eager"
            ).eval()
            hidden = config.text_config.hidden_size
            self.projector = Linear(config.audio_config.d_model, hidden, bias=True)
            ignored = (r"(^|\.)lm_head\.",) if decoder.is_tied else ()
            self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

        def encode_media(self, items):
            """Returns [num_tokens, hidden] for each item."""
            device, found = self.model.embed_tokens.weight.device, []
            for item in items:
                features = item.tensors["input_features"].to(device)
                is_padding = torch.arange(features.shape[2] // 2, device=device)
                is_padding = is_padding >= num_frames(item.tensors["attention_mask"])
                mask = torch.zeros(1, 1, 1, len(is_padding), device=device)
                mask = mask.masked_fill(is_padding, float("-inf")).to(self.projector.weight.dtype)
                x = self.audio_tower(features, attention_mask=mask).last_hidden_state
                found.append(self.projector(x[0, : item.num_tokens]))
            return found

    return Qwen2Audio()
