"""The table of what the encoders of built-in families read, in the processors' README, is true.

    python tests/plugins/test_tensor_table.py

writes it anew from the families' tiny checkpoints.
"""

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.weights.folder import read_checkpoint

README = Path(__file__).parents[2] / "processors/mmdeploy_llm_processors/README.md"
PART = re.compile(r"(<!-- tensors: begin -->\n).*?(<!-- tensors: end -->)", re.DOTALL)
PICTURE = Image.new("RGB", (120, 90), "red")
SOUND = np.zeros(16000, np.float32)
SOURCES = {"image": PICTURE, "video": [PICTURE] * 4, "audio": (SOUND, 16000)}

# Options of text models whose tiny ones have no room for an image of the usual size.
WIDE = {"gemma4_unified": {"sliding_window": 128}}


def table(folder):
    """Returns a row for each kind and form of tensors, with the families that read it."""
    manager = PluginManager.load()
    found = {}
    for spec in manager.models:
        if not spec.media or spec.tiny is None or not manager.origin(spec).is_builtin:
            continue
        own = WIDE.get(spec.name, {})
        checkpoint = read_checkpoint(write_tiny(spec.name, folder / spec.name, **own))
        for kind in spec.media:
            processor = manager.build(
                manager.media_processor(kind, spec.name, spec=spec), checkpoint, {}
            )
            item = processor.decode(SOURCES[kind], MediaLimits(isolation="thread"))
            tensors = processor.process(item, {}).tensors
            processor.close()
            form = ", ".join(
                f"`{name}` {str(tensor.dtype).removeprefix('torch.')} {axes(name, tensor)}"
                for name, tensor in tensors.items()
            )
            found.setdefault((kind, form), []).append(f"`{spec.name}`")
    rows = [
        f"| {kind} | {form} | {', '.join(sorted(names))} |"
        for (kind, form), names in sorted(found.items())
    ]
    return "\n".join(["| kind | tensors | families |", "|---|---|---|", *rows])


def axes(name, tensor):
    """Returns the shape with the axes that differ from item to item by their names."""
    if name == "pixels":
        return f"[N, {tensor.shape[1]}]"
    shapes = ("[]", "[K]", "[1, S]", "[1, S, F] or [1, F, S]")
    images = "[1, C, H, W] or [1, N, C, H, W]"  # as processors of transformers make them
    return shapes[tensor.ndim] if tensor.ndim < len(shapes) else images


@pytest.mark.full  # a tiny checkpoint of every family
def test_the_table_is_true(tmp_path):
    written = PART.search(README.read_text())[0]
    assert table(tmp_path) in written, "python tests/plugins/test_tensor_table.py writes it anew"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = table(Path(folder))
    text = PART.sub(lambda match: f"{match[1]}\n{found}\n\n{match[2]}", README.read_text())
    README.write_text(text)
