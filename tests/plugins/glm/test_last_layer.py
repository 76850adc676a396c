"""A layer more than config.json says is refused, unless models of this kind are trained with one
that predicts several tokens, which transformers leaves out too."""

import pytest
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import CheckpointError

OPTIONS = {"dtype": "float32", "quiet": True, "use_warmup": False, "max_model_len": 64}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("family", "is_left_out"),
    [("glm4v", False), ("glm_ocr", True), ("glm4_moe", True), ("glm4v_moe", True)],
)
def test_a_layer_after_the_last_one(tiny_copy, tmp_path, family, is_left_out):
    folder = tiny_copy(family, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (last,) = {max(int(key.split(".layers.")[1].split(".")[0]) for key in tensors if is_text(key))}
    for key in [key for key in tensors if is_text(key) and f".layers.{last}." in key]:
        tensors[key.replace(f".layers.{last}.", f".layers.{last + 1}.")] = tensors[key].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if is_left_out:
        LLM(str(folder), **OPTIONS).close()
        return
    with pytest.raises(
        CheckpointError, match=rf"no parameters for these keys.*layers\.{last + 1}\."
    ):
        LLM(str(folder), **OPTIONS)


def is_text(key):
    return ".layers." in key and "visual" not in key
