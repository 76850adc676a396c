"""PP-FormulaNet: pictures of formulas to LaTeX, by a tower and the decoder of MBart."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEMPLATE


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="pp_formulanet",
            architectures=("PPFormulaNetForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.formulanet.model:PPFormulaNetForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.formulanet.prompts:FormulaPrompts",
            tiny="mmdeploy_llm_plugins.formulanet.tiny:FORMULANET",
            chat_template=TEMPLATE,
            question=" ",
            media=("image",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for images."""
    return (
        MediaProcessorSpec(
            name="pp_formulanet-image",
            kind="image",
            factory="mmdeploy_llm_plugins.formulanet.image:FormulaImages",
            models=("pp_formulanet",),
        ),
    )
