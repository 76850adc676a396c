"""StarCoder 2 as a plugin of one file: LayerNorms with biases, and an MLP without a gate."""

from dataclasses import replace

from mmdeploy_llm.hooks import ModelSpec, hookimpl
from mmdeploy_llm.layers import CausalLM, standard_decoder
from mmdeploy_llm.weights.map import WeightMap

NAMES = ((r"\.mlp\.c_fc\.", ".mlp.fc1."), (r"\.mlp\.c_proj\.", ".mlp.fc2."))  # theirs -> ours


@hookimpl
def provide_models():
    """Lists the family."""
    return [
        ModelSpec(
            name="starcoder2",
            architectures=("Starcoder2ForCausalLM",),
            factory=f"{__name__}:Starcoder2ForCausalLM",
        )
    ]


class Starcoder2ForCausalLM(CausalLM):
    """Implements transformers' class of this name."""

    def __init__(self, config):
        super().__init__(replace(standard_decoder(config, own=()), has_gate=False))
        ignored = ("^lm_head",) if self.lm_head is None else ()
        self.weight_map = WeightMap(self, renames=NAMES, ignored=ignored)
