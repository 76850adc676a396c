"""Text models that are the standard decoder with a few options each: what they are is a row of
families.py. A config that asks for more is refused, and left to the next plugin."""

from __future__ import annotations

from mmdeploy_llm.hooks import ModelSpec, hookimpl

HERE = "mmdeploy_llm_plugins.decoders"
PRIORITY = -500  # below plugins made for one of these classes, above transformers_any
# model_type -> transformers' class.
CLASSES = {
    "arcee": "ArceeForCausalLM",
    "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "helium": "HeliumForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mpt": "MptForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi": "PhiForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns a spec for each of CLASSES."""
    return tuple(
        ModelSpec(
            name=name,
            architectures=(architecture,),
            factory=f"{HERE}.model:new_model",
            refuses=f"{HERE}.model:refusal",
            gguf="mmdeploy_llm_plugins.transformers_parts.gguf:TABLE",
            tiny=f"{HERE}.tiny:{name.upper()}",
            priority=PRIORITY,
        )
        for name, architecture in CLASSES.items()
    )
