"""The tiny checkpoint of the tests."""

import torch
from mmdeploy_llm.testing.tiny import CHATML, Family, MediaForm, patch_size, text_config, tiles
from transformers import LlavaConfig

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}


def make_config(tokenizer, options):
    return LlavaConfig(
        vision_config=VISION,
        text_config=text_config(tokenizer, options, model_type="llama"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def media_inputs(config, ids, media):
    return {"pixel_values": torch.cat([tiles(span.item, 1, patch_size(config)) for span in media])}


TINY = Family(
    architecture="LlavaForConditionalGeneration",
    make_config=make_config,
    chat_template=CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
    special_tokens=("<image>",),
    files={
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "full",
        },
    },
    media=MediaForm(inputs=media_inputs, merge_size=lambda config: 1, has_tiles=True),
)
