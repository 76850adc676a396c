"""The command `quantize`, which writes a quantised copy of a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

# click does not rewrap a paragraph that begins with "\b".
QUANTIZE_EPILOG = """\b
MODEL is a folder, a Hugging Face id or a bundled model's name. OUTPUT becomes a
folder in compressed-tensors' format (pack-quantized, asymmetric, by groups of
columns), with the tokenizer and the other files of MODEL. Linear layers and
experts of the decoder are rounded; embeddings, output head, norms, routers and
vision towers are copied, and so are layers that --group-size does not divide.
It is written as OUTPUT.partial and renamed at the end; a run that was killed
starts again.

\b
Examples:
  mmdeploy-llm quantize models/Qwen3-4B models/Qwen3-4B-int4
  mmdeploy-llm quantize models/Qwen3-4B out --scheme int8 --group-size 128
  mmdeploy-llm generate "What is a plug-in?" --model models/Qwen3-4B-int4"""


class Scheme(StrEnum):
    """Bits of a weight."""

    INT4 = "int4"
    INT8 = "int8"


def quantize(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, Hugging Face id or bundled model.")],
    output: Annotated[Path, typer.Argument(help="The new folder.")],
    scheme: Annotated[Scheme, typer.Option(help="Bits of a weight.")] = Scheme.INT4,
    group_size: Annotated[
        int, typer.Option(help="Columns that share a scale and a zero; a multiple of 8.")
    ] = 64,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUTPUT if it is a model's folder.")
    ] = False,
) -> None:
    """Write a copy of a model with its decoder in 4 or 8 bits, without calibration."""
    from mmdeploy_llm.quantize import quantize_checkpoint

    done = quantize_checkpoint(
        model,
        output,
        bits=4 if scheme is Scheme.INT4 else 8,
        group_size=group_size,
        overwrite=overwrite,
        **ctx.obj,
    )
    if done.stacked:
        typer.echo(f"{len(done.stacked)} tensors of stacked experts are copied as they are")
    typer.echo(
        f"{done.folder}: {done.bytes_before / 1e6:.1f} MB became {done.bytes_after / 1e6:.1f} MB, "
        f"{done.num_layers} layers in {scheme.value}, mean relative error {done.mean_error:.2%}"
    )
