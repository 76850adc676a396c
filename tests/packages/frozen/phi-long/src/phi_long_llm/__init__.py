"""Plugin `phi-long`."""

from mmdeploy_llm.hooks import ModelSpec, hookimpl

MMDEPLOY_LLM_API = (1, 1)


@hookimpl
def provide_models():
    return [
        ModelSpec(
            name="phi-long",
            architectures=("Phi3ForCausalLM",),
            factory="phi_long_llm.model:PhiLongForCausalLM",
            reasoning=None,
            tiny="phi_long_llm.tiny:TINY",
        )
    ]
