"""The options of an engine that the program has, as the fields of EngineConfig have their Flags.
Written from these by tests/test_option_dicts.py, so that --help need not import pydantic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

from .flags import Flag


class EngineFlags(TypedDict, total=False):
    """Options of EngineConfig, with the types that their values have on the command line."""

    dtype: Annotated[
        str,
        Flag(
            help="Number format of weights: auto, bfloat16, float16 or float32.",
            metavar="TYPE",
            is_rare=True,
            default="auto",
        ),
    ]
    quantization: Annotated[
        str, Flag(help="int8, int4, int8wo, int4wo, int8a8 or int4a8: weights in 8 or 4 bits.")
    ]
    reasoning_parser: Annotated[
        str,
        Flag(
            help=(
                "How to separate reasoning from the answer: auto (the model's own parser), "
                "none, or the name of a parser that `mmdeploy-llm plugins` lists."
            ),
            metavar="NAME",
            is_rare=True,
            default="auto",
        ),
    ]
    tool_call_parser: Annotated[
        str,
        Flag(
            help=(
                "How to extract tool calls from the answer: auto (the model's own parser), "
                "none, or the name of a parser."
            ),
            metavar="NAME",
            is_rare=True,
            default="auto",
        ),
    ]
    plugin_files: Annotated[
        str,
        Flag(
            help=(
                "A Python file that is loaded as a plugin, besides those that are installed: "
                "its code runs. May be repeated."
            ),
            metavar="FILE",
            is_rare=True,
            names=("--plugin",),
            type=list[Path],
            is_file=True,
        ),
    ]
    use: Annotated[
        str,
        Flag(
            help=(
                "Which plugin serves what several could, by the name of an architecture, "
                "parser, kind of media or format, such as AcmeForCausalLM=acme. May be "
                "repeated."
            ),
            metavar="NAME=PLUGIN",
            is_rare=True,
            type=list[str],
        ),
    ]
    device: Annotated[
        str,
        Flag(
            help="Where to compute: auto, cpu, cuda or cuda:N.",
            metavar="NAME",
            is_rare=True,
            default="auto",
        ),
    ]
    num_threads: Annotated[
        int,
        Flag(
            help="CPU threads for compute.  [default: one per core]",
            metavar="N",
            is_rare=True,
            min=1,
        ),
    ]
    max_num_seqs: Annotated[
        int,
        Flag(
            help="Upper limit of items that run at the same time.", metavar="N", is_rare=True, min=1
        ),
    ]
    kv_cache_dtype: Annotated[
        str,
        Flag(
            help=(
                "Number format of the KV cache. auto: the model's; int8, int4: about half and"
                " a quarter of the memory of bfloat16."
            ),
            default="auto",
        ),
    ]
    image_tokens: Annotated[
        str,
        Flag(
            help=(
                "Most tokens of a picture: a number, auto (what the model's authors use) or full."
            ),
            metavar="N",
            default="auto",
        ),
    ]
    video_tokens: Annotated[
        str,
        Flag(
            help="Most tokens of a video, as --image-tokens.",
            metavar="N",
            is_rare=True,
            default="auto",
        ),
    ]
    pixels: Annotated[
        str,
        Flag(
            help=(
                "Shape of videos whose pixels are not square, HDR, and colours that are not "
                "sRGB. square: as players and browsers show them; as-stored: as transformers "
                "reads them."
            ),
            is_rare=True,
        ),
    ]
