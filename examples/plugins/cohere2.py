"""Cohere 2 (Command R7B) as a plugin of one file: LayerNorms without biases, attention and MLP in
parallel, interleaved rotary pairs, and layers without a window that have no rotary embedding."""

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models():
    """Lists the family."""
    return [
        ModelSpec(
            name="cohere2",
            architectures=("Cohere2ForCausalLM",),
            factory="cohere2:build",
        )
    ]


def build(config):
    """Builds the model of a config."""
    from dataclasses import replace

    from mmdeploy_llm.layers import CausalLM, rotary_config, standard_decoder
    from mmdeploy_llm.weights.map import WeightMap

    decoder = replace(
        standard_decoder(config, rotary_config(config, is_interleaved=True), own=()),
        is_parallel=True,
        has_norm_biases=False,
        nope_layers=frozenset(i for i, k in enumerate(config.layer_types) if k == "full_attention"),
    )
    model = CausalLM(decoder)
    model.weight_map = WeightMap(model, ignored=("^lm_head",) if decoder.is_tied else ())
    return model
