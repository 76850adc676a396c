"""Options of the model, and of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .groups import Group

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Folder of a model, its Hugging Face id, a bundled model's name, or a GGUF file; the "
        "file with its vision tower, mmproj-*.gguf, is found in the same folder.",
    ),
]
DType = Annotated[
    str,
    typer.Option(help="Number format of weights: auto, bfloat16, float16 or float32."),
]
Engine = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Any other engine option, such as max_model_len=4096; may be repeated.",
    ),
]
NumThreads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads for compute.  [default: one per core]")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Group):
    """The model, and how it is computed."""

    model: Model = "shapes-vl"
    dtype: DType = "auto"
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N.")] = (
        "auto"
    )
    engine: Engine = None

    def to_engine(self) -> dict[str, Any]:
        """Returns the number format and the device."""
        return {"dtype": self.dtype, "device": self.device}
