"""StarCoder 2 as a plugin of one file: LayerNorms with biases, and an MLP without a gate."""

from mmdeploy_llm.hooks import ModelSpec, hookimpl

NAMES = ((r"\.mlp\.c_fc\.", ".mlp.fc1."), (r"\.mlp\.c_proj\.", ".mlp.fc2."))  # theirs -> ours


@hookimpl
def provide_models():
    """Lists the family."""
    return [
        ModelSpec(
            name="starcoder2",
            architectures=("Starcoder2ForCausalLM",),
            factory="starcoder2:build",
        )
    ]


def build(config):
    """Builds the model of a config."""
    from dataclasses import replace

    from mmdeploy_llm.layers import CausalLM, standard_decoder
    from mmdeploy_llm.weights.map import WeightMap

    model = CausalLM(replace(standard_decoder(config, own=()), has_gate=False))
    ignored = ("^lm_head",) if model.lm_head is None else ()
    model.weight_map = WeightMap(model, renames=NAMES, ignored=ignored)
    return model
