"""Fills a survey's findings into the templates of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .decoder_trial import DecoderFound
from .survey import Survey

MAX_LINE = 100
FUSED = '''
    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """Returns the targets of a key, of a matrix that holds query, key and value of each head in
        turn those of its parts."""
        targets = super().weight_targets(key)
        if not targets or ".qkv_proj." not in targets[0].name:
            return targets
        return fused_head_targets(targets[0].name, self.num_kv_heads, self.head_dim)
'''


def values(found: Survey) -> Mapping[str, str]:
    """Returns the values of the templates' names; those of code are empty without a decoder."""
    decoder = found.decoder
    texts = {} if decoder is None else _code(decoder)
    served = found.served_by
    note = f"\n            priority=1,  # the plugin {served} serves it at 0" if served else ""
    return {
        "architecture": found.architecture,
        "text_class": found.text_class or found.architecture,
        "model_type": found.model_type,
        "reasoning": _only(found.parsers.get("reasoning", ())),
        "tools": _only(found.parsers.get("tools", ())),
        "priority": note,
        **texts,
    }


def needs(found: Survey) -> str:
    """Returns the section of the README with the findings."""
    return "\n## What the checkpoint needs\n\n" + "".join(f"- {line}\n" for line in found.lines)


def _only(names: Sequence[str]) -> str:
    """Returns a name in Python where there is no choice."""
    return f'"{names[0]}"' if len(names) == 1 else "None"


def _code(found: DecoderFound) -> Mapping[str, str]:
    names = "".join(f'    (r"{pattern}", r"{new}"),\n' for pattern, new in found.renames)
    constants = f"# Names of weights: theirs -> ours.\nRENAMES = (\n{names})\n\n" if names else ""
    fields = (f"    {name}={_python(value)}," for name, value in found.fields.items())
    return {
        "imports": "\n".join(_imports(found)),
        "constants": constants,
        "renames": ", renames=RENAMES" if names else "",
        "fused": FUSED if found.has_fused_heads else "",
        "decoder": "\n".join(_decoder(found)),
        "fields": "\n".join(fields),
    }


def _imports(found: DecoderFound) -> Iterator[str]:
    if found.has_fused_heads:
        yield "from collections.abc import Sequence"
    if found.options:
        yield "from dataclasses import replace"
    yield "from typing import Any"
    yield ""
    rotary = "rotary_config, " if found.is_interleaved else ""
    yield f"from mmdeploy_llm.layers import CausalLM, DecoderConfig, {rotary}standard_decoder"
    fused = (
        ("Target", "WeightMap", "fused_head_targets") if found.has_fused_heads else ("WeightMap",)
    )
    yield f"from mmdeploy_llm.weights.map import {', '.join(fused)}"


def _decoder(found: DecoderFound) -> Iterator[str]:
    rotary = "rotary_config(config, is_interleaved=True), " if found.is_interleaved else ""
    read = f"standard_decoder(config, {rotary}own=())"  # refuses the keys that nobody reads
    if not found.options:
        yield f"    return {read}"
        return
    yield "    return replace("
    yield f"        {read},"
    for name, value in found.options.items():
        line = f"        {name}={value},"
        if len(line) > MAX_LINE:
            line = line.replace("(", f"(\n{' ' * 12}", 1).removesuffix("),") + f"\n{' ' * 8}),"
        yield line
    yield "    )"


def _python(value: object) -> str:
    """Returns a value in Python, texts in double quotes."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python(k)}: {_python(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_python, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return repr(value)
