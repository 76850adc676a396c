"""A GGUF file's own bits are kept: types that ggml's quantizer writes, one of each kind, beside
their own weights in float32. `make real-table` measures all."""

import pytest

from tests.real.closeness import measure
from tests.real.gguf_types import own_weights, quantized


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q4_K", "IQ4_NL"])
def test_the_file_is_near_its_weights(name):
    """It is so with weights alone in few bits, as by default, and with rounded activations."""
    file = quantized(name)
    with own_weights(name, 1) as reference:
        assert measure(reference, {}, file).kl <= 0.002
        assert measure(reference, {"quantization": "int8"}, file).kl <= 0.03
