"""Phi-3 as a plugin of one file: LLM(folder, plugins=["phi3.py"]). The standard decoder reads all
options of its config, among them windows and longrope."""

from mmdeploy_llm.hooks import ModelSpec, hookimpl
from mmdeploy_llm.layers import CausalLM, standard_decoder
from mmdeploy_llm.weights.map import WeightMap


@hookimpl
def provide_models():
    """Lists the family."""
    return [
        ModelSpec(
            name="phi3",
            architectures=("Phi3ForCausalLM",),
            factory=f"{__name__}:Phi3ForCausalLM",
            deterministic=True,
        )
    ]


class Phi3ForCausalLM(CausalLM):
    """Reads checkpoints that store query, key and value as one matrix, and gate and up."""

    def __init__(self, config):
        super().__init__(standard_decoder(config, own=()))
        ignored = ("inv_freq$", *(("^lm_head",) if self.lm_head is None else ()))
        self.weight_map = WeightMap(self, ignored=ignored)
