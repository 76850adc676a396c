"""Writes a tiny LLaVA with random weights, whose tokenizer and chat template support charts."""

from pathlib import Path

from mmdeploy_llm.testing import make_tokenizer, write_checkpoint
from transformers import LlavaConfig

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<chart>' if part.type == 'chart' else part.text }}"
    "{% endfor %}{% endfor %}{{ ' ASSISTANT:' }}"
)
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}


def write_tiny_llava(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    config = LlavaConfig(
        vision_config=VISION,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    return write_checkpoint(
        config, folder, tokenizer=tokenizer, architecture="LlavaForConditionalGeneration"
    )
