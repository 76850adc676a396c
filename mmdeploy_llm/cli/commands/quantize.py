"""The command `quantize`, which writes a quantised copy of a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmdeploy_llm.cli.options.groups import with_groups
from mmdeploy_llm.cli.options.missing import check_copy, check_rounding
from mmdeploy_llm.cli.options.model import known_model
from mmdeploy_llm.cli.options.providers import ProviderOptions

if TYPE_CHECKING:
    from mmdeploy_llm.checkpoints.quantize import Quantized

# click does not rewrap a paragraph that begins with "\b".
QUANTIZE_EPILOG = """\b
MODEL is a folder, a Hugging Face id or a bundled model's name. OUTPUT becomes a
folder in compressed-tensors' format (pack-quantized, by groups of columns,
asymmetric but for experts), with the tokenizer and the other files of MODEL.
Linear layers and experts of the decoder are rounded; embeddings, output head,
norms, routers and vision towers are copied, and so are layers that --group-size
does not divide.
--towers int8 rounds towers too; transformers (up to 5.24) misreads such a folder,
since it reads all layers by the decoder's scheme. OUTPUT is written as
OUTPUT.partial and renamed at the end; a run that was killed is continued by the
same command.

\b
--calibrate makes 4 bits better. It takes 50 to 500 prompts like those that the
model will answer: a folder of images and videos (each is described), or a JSONL
file of requests as `mmdeploy-llm batch` reads them, or `builtin`, the 59 short
prompts that come with this program (prose, chats, code, eleven languages). The
model answers them once; then its decoder is scaled (AWQ) and rounded (GPTQ), two
layers at a time, so that these prompts and answers change least. Every tenth item
is held out: on these, perplexity and divergence before and after are printed and
written to OUTPUT/quantization_loss.json.

\b
Examples:
  mmdeploy-llm quantize models/acme-4b models/acme-4b-int4
  mmdeploy-llm quantize models/acme-4b out --scheme int8 --group-size 128
  mmdeploy-llm quantize models/acme-4b out --calibrate requests.jsonl
  mmdeploy-llm generate "What is a plug-in?" --model models/acme-4b-int4"""


class Scheme(StrEnum):
    """Bits of a weight."""

    INT4 = "int4"
    INT8 = "int8"


class Towers(StrEnum):
    """Whether vision towers are copied or rounded."""

    COPY = "copy"
    INT8 = "int8"


@with_groups
def quantize(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Folder, Hugging Face id or bundled model.", callback=known_model)
    ],
    output: Annotated[Path, typer.Argument(help="The new folder.")],
    scheme: Annotated[Scheme, typer.Option(help="Bits of a weight.")] = Scheme.INT4,
    group_size: Annotated[
        int,
        typer.Option(
            help="Columns that share a scale and a zero: a multiple of 8, or -1 for whole rows."
        ),
    ] = 64,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER_OR_JSONL",
            help="Images and videos, or requests, to calibrate the decoder with; `builtin`: the "
            "prompts that come with this program.",
        ),
    ] = None,
    towers: Annotated[
        Towers, typer.Option(help="What becomes of vision towers: copied, or rounded to 8 bits.")
    ] = Towers.COPY,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUTPUT if it is a model's folder.")
    ] = False,
    *,
    providers: ProviderOptions,
) -> None:
    """Write a copy of a model with its decoder in 4 or 8 bits."""
    choice = providers.choice(ctx.obj)
    check_rounding(group_size, calibrate)
    check_copy(model, output, choice, overwrite=overwrite)
    from mmdeploy_llm.checkpoints.quantize import quantize_checkpoint
    from mmdeploy_llm.client.llm import LLM

    found = quantize_checkpoint(
        model,
        output,
        bits=4 if scheme is Scheme.INT4 else 8,
        group_size=group_size,
        calibrate_with=calibrate,
        open_model=None if calibrate is None else LLM,
        rounds_towers=towers is Towers.INT8,
        overwrite=overwrite,
        **choice,
    )
    _report(found, scheme)


def _report(found: Quantized, scheme: Scheme) -> None:
    """Prints what was done, and what it lost if that was measured."""
    done, loss = found.summary, found.loss
    if done.stacked:
        typer.echo(f"{len(done.stacked)} tensors of stacked experts are copied as they are")
    if found.num_unseen:
        typer.echo(
            f"{found.num_unseen} of {found.num_experts} experts saw no token of the calibration: "
            "they are rounded to the nearest codes. More or other prompts reach them"
        )
    for reason in found.skipped:
        typer.echo(f"calibration item skipped: {reason}", err=True)
    typer.echo(
        f"{done.folder}: {done.bytes_before / 1e6:.1f} MB became {done.bytes_after / 1e6:.1f} MB, "
        f"{done.num_layers} layers in {scheme.value}, mean relative error {done.mean_error:.2%}"
    )
    if loss is not None:
        typer.echo(
            f"calibrated with {loss.num_used} items: errors of the layers' outputs are "
            f"{found.gain:.0%} of those without\n"
            f"lost on {loss.num_items} held-out items ({loss.num_tokens} tokens): perplexity "
            f"{loss.perplexity_before:.4f} became {loss.perplexity_after:.4f}, KL divergence "
            f"{loss.divergence:.5f} nats a token, same top token {loss.same_top:.2%}"
        )
