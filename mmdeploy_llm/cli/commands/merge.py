"""The command `merge`, which writes a copy of a model with an adapter in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmdeploy_llm.cli.options.groups import with_groups
from mmdeploy_llm.cli.options.missing import check_copy
from mmdeploy_llm.cli.options.model import known_model
from mmdeploy_llm.cli.options.providers import ProviderOptions

# click does not rewrap a paragraph that begins with "\b".
MERGE_EPILOG = """\b
MODEL is a folder or a Hugging Face id whose weights are floats; ADAPTER is the
folder of a LoRA as PEFT saves it. OUTPUT becomes a model's folder that needs no
adapter, with the tokenizer and the other files of MODEL, or the tokenizer of
ADAPTER where that has one. It is written as OUTPUT.partial and renamed at the
end; a run that was killed is continued by the same command.
A quantised model is not merged: merge first, then run `mmdeploy-llm quantize`.

\b
Examples:
  mmdeploy-llm merge models/acme-4b adapters/birds models/acme-4b-birds
  mmdeploy-llm merge acme/acme-4b runs/checkpoint-500 merged
  mmdeploy-llm generate "What is a wren?" --model models/acme-4b-birds"""


@with_groups
def merge(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or Hugging Face id.", callback=known_model)],
    adapter: Annotated[Path, typer.Argument(help="Folder of the adapter.")],
    output: Annotated[Path, typer.Argument(help="The new folder, which must not exist.")],
    *,
    providers: ProviderOptions,
) -> None:
    """Write a copy of a model with a LoRA adapter merged into its weights."""
    choice = providers.choice(ctx.obj)
    check_copy(model, output, choice, adapter=adapter)
    from mmdeploy_llm.checkpoints.saving import merge_adapter

    found = merge_adapter(model, adapter, output, **choice)
    if found.taken:
        typer.echo(f"{', '.join(found.taken)}: from {adapter}")
    if found.is_untied:
        typer.echo("the output head is no longer the embedding: tie_word_embeddings is false now")
    typer.echo(
        f"{found.folder}: {found.num_changed} tensors changed, {found.num_bytes / 1e6:.1f} MB"
    )
