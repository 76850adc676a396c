"""Plugin `palette`."""

from mmdeploy_llm.hooks import MediaProcessorSpec, hookimpl


@hookimpl
def provide_media_processors():
    return [
        MediaProcessorSpec(
            name="palette",
            kind="palette",
            factory="palette_llm.processor:PaletteProcessor",
            models=("palette",),
            suffixes=(".gpl",),
            columns=("palette",),
        )
    ]
