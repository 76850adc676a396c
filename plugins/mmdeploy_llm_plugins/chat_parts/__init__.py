"""Content parts of OpenAI's interfaces that have other names or forms than ours: `input_text`,
`output_text`, `refusal`, `input_image`, `image_pil`, `file`, `input_file`."""

from __future__ import annotations

from mmdeploy_llm.hooks import ChatPartSpec, hookimpl

FUNCTIONS = f"{__name__}.openai"
ANY_OTHER = {"*": object}  # what a file for other programs has beside, such as "annotations"
FILE = {"file": dict, "file_data": str, "file_url": str, "filename": str}


@hookimpl
def provide_chat_parts() -> tuple[ChatPartSpec, ...]:
    """Returns the parts."""
    return (
        ChatPartSpec(
            name="openai-text",
            types=("input_text", "output_text"),
            factory=f"{FUNCTIONS}:text",
            keys={"text": str},
            optional=ANY_OTHER,
        ),
        ChatPartSpec(
            name="openai-refusal",
            types=("refusal",),
            factory=f"{FUNCTIONS}:refusal",
            keys={"refusal": str},
            optional=ANY_OTHER,
        ),
        ChatPartSpec(
            name="openai-image",
            types=("input_image", "image_pil"),
            factory=f"{FUNCTIONS}:image",
            optional=ANY_OTHER,
        ),
        ChatPartSpec(
            name="openai-file",
            types=("file", "input_file"),
            factory=f"{FUNCTIONS}:file",
            optional={**FILE, **ANY_OTHER},
        ),
    )
