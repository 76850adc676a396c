#!/usr/bin/env bash
# Weights drawn from a normal distribution, quantised and read back with gguf 0.19.0 (the package of
# llama.cpp). Error against the size of the weights, by their standard deviation:
#
#     deviation   Q8_0       Q5_0       Q4_0       F16
#     1e-2        0.5 %      4.3 %      8.6 %      0.0 %
#     1e-4        1.1 %      4.3 %      8.7 %      0.0 %
#     1e-5        9.6 %      4.5 %      8.6 %      0.2 %
#     1e-6        100 %      13 %       10 %       1.7 %
#
# Eight bits are worse than four, and at 1e-6 nearly all the weights are 0. One takes Q8_0 for the
# careful choice and believes a quantiser with a scale for every 32 weights to be blind to their size.
# But the scale is a float16, and is the largest weight divided by 127 in Q8_0, by 16 in Q5_0, by 8 in
# Q4_0. Below 6e-5 a float16 has fewer digits and below 3e-8 none: the more bits, the sooner. F16
# itself keeps those weights. There is no error and no warning. So small are layers that begin at zero
# and were trained for a short time, such as the B of a LoRA adapter. The last lines show one: with A
# of 0.5 and B of 1e-6 Q8_0 leaves nothing of the adapter, which then does nothing rather than
# something wrong. Scale such a pair before the conversion (A down, B up: the product is the same), or
# store it as F16 or F32.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	gguf==0.19.0 safetensors==0.8.0 numpy==2.3.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gguf
import numpy as np
import safetensors.numpy

generator = np.random.default_rng(0)
FORMATS = ("Q8_0", "Q5_0", "Q4_0", "F16")


def normal(deviation, *shape):
    return (deviation * generator.standard_normal(shape)).astype(np.float32)


def read_back(tensors, format):
    """Returns the tensors after they were in a GGUF file in a format."""
    kind = gguf.GGMLQuantizationType[format]
    writer = gguf.GGUFWriter("adapter.gguf", "llama")
    for name, tensor in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {}
    for tensor in gguf.GGUFReader("adapter.gguf").tensors:
        assert tensor.tensor_type == kind
        found[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return found


def error(found, right):
    return 100 * float(np.linalg.norm(found - right) / np.linalg.norm(right))


EXPECTED = {  # deviation: error in percent of each format
    1e-2: (0.5, 4.3, 8.6, 0.0),
    1e-4: (1.1, 4.3, 8.7, 0.0),
    1e-5: (9.6, 4.5, 8.6, 0.2),
    1e-6: (100, 13, 10, 1.7),
}
for deviation, expected in EXPECTED.items():
    weight = normal(deviation, 256, 256)
    made = {format: read_back({"w": weight}, format)["w"] for format in FORMATS}
    found = [error(made[format], weight) for format in FORMATS]
    print(f"{deviation:.0e}:", ", ".join(f"{f} {e:.2f} %" for f, e in zip(FORMATS, found)))
    assert np.allclose(found, expected, rtol=0.06, atol=0.05), "the behaviour has changed"

# A LoRA adapter, from a file in safetensors: the same numbers, once as they are and once balanced.
BALANCE = np.float32(2**9)
safetensors.numpy.save_file({"A": normal(0.5, 64, 256), "B": normal(1e-6, 256, 64)}, "lora.safetensors")
plain = safetensors.numpy.load_file("lora.safetensors")
balanced = {"A": plain["A"] / BALANCE, "B": plain["B"] * BALANCE}
right = plain["B"] @ plain["A"]
for what, adapter, expected in (("plain", plain, 100), ("balanced", balanced, 0.8)):
    made = read_back(adapter, "Q8_0")
    found = error(made["B"] @ made["A"], right)
    print(f"LoRA in Q8_0, {what}: B @ A is off by {found:.2f} %")
    assert abs(found - expected) < 0.2
PYTHON
