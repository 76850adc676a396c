"""Writes the weights that OpenVINO rounded as a checkpoint of floats, so that their error can be
measured apart from its products: openvino_weights.py EXPORTED MODEL_FOLDER OUTPUT.

Runs in the environment that exported the model (openvino, torch, safetensors). Matrices that the
export left in floats are those of MODEL_FOLDER. quantization_quality.py --other reads OUTPUT.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import openvino
import torch
from safetensors.torch import load_file, save_file

SUFFIX = "._openvino_orig_weight"  # of a rounded weight's constant


def rounded_weights(exported: Path) -> dict[str, torch.Tensor]:
    """Returns the checkpoint's name of each rounded weight -> its values, float32 [n, k]."""
    model = openvino.Core().read_model(exported / "openvino_model.xml")
    constants = {
        op.get_friendly_name(): op
        for op in model.get_ordered_ops()
        if op.get_type_name() == "Constant"
    }

    def values(name: str) -> np.ndarray:
        return constants[name].get_data(dtype=np.float32)

    found = {}
    for name in constants:
        if name.endswith(SUFFIX):
            codes = values(name)
            zero = f"{name}/zero_point"
            shifted = codes - values(zero) if zero in constants else codes
            matrix = (shifted * values(f"{name}/scale")).reshape(codes.shape[0], -1)
            found[name.removeprefix("self.").removesuffix(SUFFIX) + ".weight"] = matrix
    return {name: torch.from_numpy(matrix) for name, matrix in found.items()}


def main(exported: Path, plain: Path, output: Path) -> None:
    """Copies `plain` to `output` with the rounded weights in place of its own."""
    shutil.copytree(plain, output)
    tensors = load_file(output / "model.safetensors")
    for name, weight in rounded_weights(exported).items():
        error = (weight - tensors[name].float()).norm() / tensors[name].float().norm()
        print(f"{name}: relative error {error:.4f}")
        tensors[name] = weight.to(torch.bfloat16)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
