"""Cohere 2 (Command R7B) as a plugin of one file: LayerNorms without biases, attention and MLP in
parallel, interleaved rotary pairs, and layers without a window that have no rotary embedding."""

from dataclasses import replace

from mmdeploy_llm.hooks import ModelSpec, hookimpl
from mmdeploy_llm.layers import CausalLM, rotary_config, standard_decoder
from mmdeploy_llm.weights.map import WeightMap


@hookimpl
def provide_models():
    """Lists the family."""
    return [
        ModelSpec(
            name="cohere2",
            architectures=("Cohere2ForCausalLM",),
            factory=f"{__name__}:Cohere2ForCausalLM",
        )
    ]


class Cohere2ForCausalLM(CausalLM):
    """Implements transformers' class of this name."""

    def __init__(self, config):
        kinds = enumerate(config.layer_types)
        decoder = replace(
            standard_decoder(config, rotary_config(config, is_interleaved=True), own=()),
            is_parallel=True,
            has_norm_biases=False,
            nope_layers=frozenset(i for i, kind in kinds if kind == "full_attention"),
        )
        super().__init__(decoder)
        self.weight_map = WeightMap(self, ignored=("^lm_head",) if decoder.is_tied else ())
