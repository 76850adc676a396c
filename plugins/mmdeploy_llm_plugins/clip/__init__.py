"""CLIP, SigLIP, SigLIP 2 and TIPSv2: vectors of texts and of images in one space."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.clip"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the specs of the families, named as in transformers."""
    return (
        ModelSpec(
            name="clip",
            architectures=("CLIPModel",),
            factory=f"{PACKAGE}.models:CLIPModel",
            tiny=f"{PACKAGE}.tiny:CLIP",
            media=("image",),
        ),
        ModelSpec(
            name="siglip",
            architectures=("SiglipModel",),
            factory=f"{PACKAGE}.models:SiglipModel",
            tiny=f"{PACKAGE}.tiny:SIGLIP",
            media=("image",),
        ),
        ModelSpec(
            name="siglip2",
            architectures=("Siglip2Model",),
            factory=f"{PACKAGE}.models:Siglip2Model",
            tiny=f"{PACKAGE}.tiny:SIGLIP2",
            media=("image",),
        ),
        ModelSpec(
            name="tipsv2",
            architectures=("Tipsv2Model",),
            factory=f"{PACKAGE}.tips:Tipsv2Model",
            tiny=f"{PACKAGE}.tiny:TIPSV2",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for images."""
    return (
        MediaProcessorSpec(
            name="clip-image",
            kind="image",
            factory=f"{PACKAGE}.image:TowerImages",
            models=("clip", "siglip"),
        ),
        MediaProcessorSpec(
            name="siglip2-image",
            kind="image",
            factory=f"{PACKAGE}.image:FlexibleImages",
            models=("siglip2",),
        ),
        MediaProcessorSpec(
            name="tipsv2-image",
            kind="image",
            factory=f"{PACKAGE}.image:TipsImages",
            models=("tipsv2",),
        ),
    )
