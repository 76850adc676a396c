"""A plugin of another package: the kind "sketch", which is split into pictures."""

import json

from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaProcessorSpec, MediaSplitter, SplitPart, hookimpl

BEGIN = b"SKETCH1 "


class Sheets:
    """The sheets of a sketch; its colours are known before one is drawn."""

    def __init__(self, colours):
        self.colours = colours

    def __len__(self):
        return len(self.colours)

    def __getitem__(self, index):
        sheet = Image.new("RGB", (56, 56), self.colours[index])
        return SplitPart(source=sheet, label=f"sheet {index + 1}")


class SketchSplitter(MediaSplitter):
    kind = "sketch"
    markers = ("<sketch>",)
    part_name = "sheet"

    def __init__(self, checkpoint, options):
        pass

    def split(self, source, options, limits):
        if not source.startswith(BEGIN):
            raise MediaError("it does not begin as a sketch does")
        return Sheets(json.loads(source.removeprefix(BEGIN)))


@hookimpl
def provide_media_processors():
    return [
        MediaProcessorSpec(
            name="sketch",
            kind="sketch",
            factory="sketches:SketchSplitter",
            suffixes=(".sketch",),
            columns=("sketch", "drawing"),
            first_bytes=(BEGIN,),
            yields="image",
        ),
    ]
