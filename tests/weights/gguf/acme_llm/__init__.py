"""A family of somebody else, whole: its model, its tiny checkpoint, and a GGUF architecture that no
library knows."""

from mmdeploy_llm.hooks import ModelSpec, hookimpl


@hookimpl
def provide_models():
    """Returns the spec of Acme, which is a Seed-OSS without biases."""
    return (
        ModelSpec(
            name="acme",
            architectures=("SeedOssForCausalLM",),
            factory="acme_llm.model:AcmeForCausalLM",
            gguf="acme_llm.gguf:TABLE",
            tiny="acme_llm.tiny:TINY",
        ),
    )
