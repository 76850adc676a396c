"""Phi-3 as a plugin of one file: the standard decoder, with windows and longrope."""

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models():
    """Lists the family. Whoever lists plugins imports this file, so torch is imported below."""
    return [
        ModelSpec(
            name="phi3-of-one-file",
            architectures=("Phi3ForCausalLM",),
            factory="phi3:build",
            priority=1,  # the built-in plugin serves it at 0
            deterministic=True,
        )
    ]


def build(config):
    """Builds the model of a config; its checkpoints store q, k, v as one matrix, and gate, up."""
    from mmdeploy_llm.layers import CausalLM, standard_decoder
    from mmdeploy_llm.weights.map import WeightMap

    model = CausalLM(standard_decoder(config, own=()))
    ignored = (r"inv_freq$", *(["^lm_head"] if model.lm_head is None else []))
    model.weight_map = WeightMap(model, ignored=ignored)
    return model
