"""Formats of outputs: WebDataset tars, arrays of numpy and Lance datasets."""

from __future__ import annotations

from mmdeploy_llm.hooks import OutputSinkSpec, hookimpl


@hookimpl
def provide_output_sinks() -> tuple[OutputSinkSpec, ...]:
    """Returns the specs, in the order in which they are listed."""
    return (
        OutputSinkSpec(
            name="webdataset",
            suffixes=(".tar",),
            factory=f"{__name__}.tars:TarParts",
            options=("part_items", "media_root"),
        ),
        OutputSinkSpec(
            name="npy",
            suffixes=(".npy",),
            factory=f"{__name__}.npy:NpyParts",
            holds=("vectors",),
            options=("part_items",),
        ),
        OutputSinkSpec(
            name="lance",
            suffixes=(".lance",),
            factory=f"{__name__}.lance_store:LanceStore",
            holds=("vectors",),
        ),
    )
