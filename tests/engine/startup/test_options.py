"""Options are checked, and told, before the weights are loaded."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.engine.startup.options import warn_of_loss
from mmdeploy_llm.values.options.config import EngineConfig


@pytest.mark.parametrize(
    ("options", "num_bytes", "is_quantized", "told"),
    [
        ({"quantization": "int4"}, 2**28, False, ["quantization = 'int4' keeps about 66 of 100"]),
        ({"quantization": "int8a8"}, 2**28, False, ["quantization = 'int8a8' keeps about 94"]),
        ({"quantization": "int8"}, 2**28, False, []),
        (
            {"quantization": "int8", "device": "cuda"},
            2**28,
            False,
            ["quantization = 'int8' keeps about 89"],
        ),
        ({"kv_cache_dtype": "int4"}, 2**28, True, ["kv_cache_dtype = 'int4' keeps about 90"]),
        ({"quantization": "int8wo", "kv_cache_dtype": "int8"}, 2**28, False, []),
        ({"quantization": "int4"}, 2**28, True, []),  # only activations are rounded
        ({"quantization": "int4"}, 2**33, False, []),
        ({"quantization": "int4"}, 2**20, False, []),
        ({"quantization": "int4", "load_format": "dummy"}, 2**28, False, []),
    ],
)
def test_few_bits_of_small_models_are_warned_of(caplog, options, num_bytes, is_quantized, told):
    given = EngineConfig(model="m", **options)
    runtime = SimpleNamespace(
        options=given,
        quantization=given.quantization,
        kv_cache_dtype=given.kv_cache_dtype,
        device="cuda" if given.device == "cuda" else "cpu",
    )
    warn_of_loss(runtime, SimpleNamespace(stored_bytes=num_bytes, is_quantized=is_quantized))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(told)
    assert all(message.startswith(start) for message, start in zip(messages, told, strict=True))
