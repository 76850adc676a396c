"""A tiny checkpoint of Acme; the GGUF files of the tests are written from it."""

from transformers import SeedOssConfig

from mmdeploy_llm.testing.tiny import CHATML, Family, text_config


def _config(tokenizer, options):
    sizes = text_config(tokenizer, {"head_dim": 16, "rms_norm_eps": 3e-5, **options})
    return SeedOssConfig(**sizes, attention_bias=False)


TINY = Family(
    architecture="SeedOssForCausalLM",
    make_config=_config,
    chat_template=CHATML,
    eos_token="<|im_end|>",
)
