"""A plugin of somebody else, with a GGUF architecture that no library knows."""

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models():
    """Returns the spec of Acme."""
    return (
        ModelSpec(
            name="acme",
            architectures=("AcmeForCausalLM",),
            factory="acme_llm.model:AcmeForCausalLM",
            gguf="acme_llm.gguf:TABLE",
        ),
    )
