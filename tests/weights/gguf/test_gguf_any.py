"""GGUF files of architectures without a plugin of their own: transformers_any reads those that
llama.cpp's converter only renames."""

from __future__ import annotations

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_parts.gguf import TABLE

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.models.reference import Reference
from mmdeploy_llm.testing.tiny import make_tokenizer, randomize
from mmdeploy_llm.weights.folder import read_checkpoint

from .gguf_writing import write_gguf

PROMPTS = ([5, 9, 200, 31, 7, 77, 78, 79, 80, 12, 13], [40, 41, 42])
NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOWS = {"sliding_window": 7, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
CASES = {  # name -> general.architecture, class of transformers, options of its config
    # LayerNorm and biases everywhere; no gate in the MLP; the head is the embedding.
    "starcoder2": ("starcoder2", "Starcoder2", {"norm_epsilon": 3e-5}),
    # Biases of queries, keys and values.
    "seed_oss": ("seed_oss", "SeedOss", {"head_dim": 16}),
    # Norms after attention and MLP, and on queries and keys.
    "olmo2": ("olmo2", "Olmo2", {"rms_norm_eps": 2e-6}),
    # The same, with windows.
    "olmo3": ("olmo2", "Olmo3", WINDOWS),
    # LayerNorm without biases, before attention and MLP side by side; scaled logits.
    "cohere": ("command-r", "Cohere", {"logit_scale": 0.25}),
    # Windows; the other layers rotate nothing.
    "exaone4": ("exaone4", "Exaone4", {**WINDOWS, "rms_norm_eps": 2e-6}),
    "exaone4 without windows": (
        "exaone4",
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    # Half of each head is rotated; a head with biases.
    "phi": (
        "phi2",
        "Phi",
        {
            "num_key_value_heads": 4,
            "intermediate_size": 256,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}


def write_model(folder, name, options):
    tokenizer = make_tokenizer("llama")
    ids = {"pad_token_id": 0, "bos_token_id": tokenizer.bos_token_id}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **ids, **(SIZES | options)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


QUICK = ("starcoder2", "olmo3")


def generated(model):
    with LLM(model=str(model), dtype="float32", max_model_len=256, quiet=True) as llm:
        assert llm.plugins.owner(llm.plugins.model_for(["*"])) == "transformers_any"
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in PROMPTS], PARAMS)
    return [list(output.outputs.token_ids) for output in outputs]


def test_every_architecture_of_the_table_is_tested():
    assert {arch for arch, _, _ in CASES.values()} == set(TABLE.models)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("arch", "name", "options"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * (name not in QUICK), id=name)
        for name, case in CASES.items()
    ],
)
def test_tokens_of_a_file_alone(tmp_path, arch, name, options):
    """Config, tokenizer and weights are those of the file."""
    source = write_model(tmp_path / "source", name, options)
    place = tmp_path / "place"
    place.mkdir()
    write_gguf(source, place / "tiny.gguf", arch=arch)
    found, wanted = (read_checkpoint(folder).config.to_dict() for folder in (place, source))
    same = {key for key in wanted if found.get(key) == wanted[key]}
    unlike = wanted.keys() - same - {"_name_or_path", "head_dim", "transformers_version"}
    assert not {key: (found.get(key), wanted[key]) for key in unlike if wanted[key] is not None}
    reference = Reference(source)
    wanted_tokens = [reference.generate(ids, NUM_TOKENS) for ids in PROMPTS]
    assert generated(place) == wanted_tokens
    assert len(set(map(tuple, wanted_tokens))) == len(PROMPTS)
