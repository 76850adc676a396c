"""WeightFormatSpec: a format in which checkpoints store weights in few bits. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormatSpec:
    """A format of quantised checkpoints; `aliases` are other names for it.

    name: what `quant_method` of config.json's quantization_config says.
    factory: "module:function", called as function(settings, stored) when a checkpoint of the format
        is loaded, on every rank. settings: quantization_config, a mapping. stored: the tensors of
        all files, a Stored of mmdeploy_llm.weights.quantized. It yields a QuantizedLayer for each
        weight that is stored in few bits, and reads no more than it needs to know their shapes; the
        engine reads and decodes one weight after the other. It raises CheckpointError for settings
        or tensors that it does not read, unknown settings included, and names them.
    suffixes: what the tensors of a weight are called after the weight's name, such as ".qweight"
        and ".scales". One that no weight needs is an error that names those that are missing, and
        so is a ".weight" of no floats. A format whose weights also have plain tensors lists them.
    ignored: suffixes of tensors that are stored beside weights and not needed, such as scales of
        activations.
    quantise: "module:function" for tests, called as function(weight) with [n, k] float32; returns
        the tensors of a weight by suffix, and the settings. Raises ValueError for a shape that the
        format does not have.
    """

    name: str
    factory: str
    suffixes: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    quantise: str | None = None
    priority: int = 0
