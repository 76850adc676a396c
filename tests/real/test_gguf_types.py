"""A GGUF file's own bits are kept: each type that ggml's quantizer writes, beside its own weights
in float32."""

import pytest

from tests.real.closeness import measure
from tests.real.gguf_types import TYPES, own_weights, quantized


@pytest.mark.parametrize("name", TYPES)
def test_the_file_is_near_its_weights(name):
    """With weights alone in few bits, as by default, and with rounded activations."""
    file = quantized(name)
    with own_weights(name, 1) as reference:
        assert measure(reference, {}, file).kl <= 0.002
        assert measure(reference, {"quantization": "int8"}, file).kl <= 0.03
