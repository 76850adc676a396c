"""Tiny models with random adapters, as peft writes and computes them."""

import warnings

import torch
import transformers
from peft import LoraConfig, get_peft_model

from mmdeploy_llm import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZE = 0.3  # of random values: large enough to change most tokens


def write_adapter(base, folder, *, seed=1, auto=transformers.AutoModelForCausalLM, **options):
    """Writes a random adapter for the model in `base`; returns peft's model with it."""
    model = auto.from_pretrained(base, dtype=torch.float32).eval()
    given = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads what transformers will remove
        made = get_peft_model(model, LoraConfig(**given))
    generator = torch.Generator().manual_seed(seed)
    for name, values in sorted(made.named_parameters()):
        if "lora_" in name and "magnitude" not in name:
            values.data.normal_(0, SIZE, generator=generator)
        elif "magnitude" in name:
            values.data.mul_(1 + SIZE * torch.rand(values.shape, generator=generator))
        elif "modules_to_save" in name or (name.endswith(".bias") and given.get("bias")):
            values.data.add_(torch.randn(values.shape, generator=generator) * SIZE)
        elif "trainable_tokens_delta" in name:
            values.data.normal_(0, SIZE, generator=generator)
    made.save_pretrained(folder)
    return made.eval()


@torch.inference_mode()
def tokens_of(model, ids, count=8, **inputs):
    """The greedy tokens that transformers generates after `ids`."""
    given = torch.tensor([list(ids)])
    found = model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **inputs,
    )
    return found[0, given.shape[1] :].tolist()


def answers(llm, prompts, params=GREEDY):
    """The token ids of each answer."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error_msg for output in outputs if not output.is_ok] == []
    return [list(output.outputs.token_ids) for output in outputs]
