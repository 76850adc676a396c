"""ColPali, ColQwen2 and ColModernVBert: a vector for each token of a page or of a query, compared
by MaxSim. UltraVBert, of the same parts, has one vector for a text or a picture, and NeoMME both
kinds."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.colpali"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the families, named as in transformers."""
    return (
        ModelSpec(
            name="colpali",
            architectures=("ColPaliForRetrieval",),
            factory=f"{PACKAGE}.pali:ColPaliForRetrieval",
            tiny=f"{PACKAGE}.tiny:COLPALI",
            vectors=f"{PACKAGE}.rules:PALI",
            media=("image",),
        ),
        ModelSpec(
            name="colqwen2",
            architectures=("ColQwen2ForRetrieval",),
            factory=f"{PACKAGE}.qwen:ColQwen2ForRetrieval",
            tiny=f"{PACKAGE}.tiny:COLQWEN2",
            vectors=f"{PACKAGE}.rules:QWEN",
            media=("image",),
        ),
        ModelSpec(
            name="colmodernvbert",
            architectures=("ColModernVBertForRetrieval",),
            factory=f"{PACKAGE}.modern:ColModernVBertForRetrieval",
            tiny=f"{PACKAGE}.tiny:COLMODERNVBERT",
            vectors=f"{PACKAGE}.rules:MODERN",
            media=("image",),
        ),
        ModelSpec(
            name="ultravbert",
            architectures=("UltraVBertModel", "UltraVBertForMaskedLM"),
            factory=f"{PACKAGE}.ultra:UltraVBertModel",
            tiny=f"{PACKAGE}.tiny:ULTRAVBERT",
            media=("image",),
        ),
        ModelSpec(
            name="neomme",
            architectures=("NeoMMEModel", "NeoMMEForMaskedLM"),
            factory=f"{PACKAGE}.neomme:NeoMMEModel",
            media=("image",),
        ),
        ModelSpec(
            name="neomme_retrieval",
            architectures=("NeoMMEForRetrieval",),
            factory=f"{PACKAGE}.neomme:NeoMMEForRetrieval",
            tiny=f"{PACKAGE}.tiny:NEOMME",
            vectors=f"{PACKAGE}.rules:NEOMME",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images."""
    return (
        MediaProcessorSpec(
            name="colpali-image",
            kind="image",
            factory=f"{PACKAGE}.image:PaliImages",
            models=("colpali",),
        ),
        MediaProcessorSpec(
            name="colqwen2-image",
            kind="image",
            factory=f"{PACKAGE}.image:QwenImages",
            models=("colqwen2",),
        ),
        MediaProcessorSpec(
            name="colmodernvbert-image",
            kind="image",
            factory=f"{PACKAGE}.image:ModernImages",
            models=("colmodernvbert",),
        ),
        MediaProcessorSpec(
            name="ultravbert-image",
            kind="image",
            factory=f"{PACKAGE}.image:UltraImages",
            models=("ultravbert",),
        ),
        MediaProcessorSpec(
            name="neomme-image",
            kind="image",
            factory=f"{PACKAGE}.neomme_image:NeoMMEImages",
            models=("neomme", "neomme_retrieval"),
        ),
    )
