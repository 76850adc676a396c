"""Builds the intake of a model without the model: it counts tokens and needs no weights."""

from __future__ import annotations

import torch

from mmdeploy_llm.engine.intake.intake import Intake
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.text.closing import closed_on_error
from mmdeploy_llm.weights.folder import PROMPT_FILES

from .cards import CudaSetup
from .machine import Machine
from .media import build_media
from .model_files import read_model_files
from .options import final_options
from .rooms import build_intake

# Options of computing, which no token depends on, as an engine for counting has them.
NOT_COMPUTING = {
    "attention_backend": "auto",
    "device": "cpu",
    "dtype": "float32",
    "guided_decoding_backend": "off",
    "kv_cache_dtype": "auto",
}


def open_intake(config: EngineConfig) -> Intake:
    """Returns an intake that prepares prompts as the engine with these options would, from the
    configuration, the tokenizer and the processors alone. Compiles nothing and reads no weights;
    of a model on the hub it fetches none. Raises what `read_model_files` raises."""
    config = config.model_copy(update=NOT_COMPUTING)
    files = read_model_files(config, PROMPT_FILES)
    nothing = CudaSetup(torch=torch.__version__)
    machine = Machine(cpus=(0,), placement=None, cuda=nothing, kernels=TORCH)
    runtime = final_options(config, files, machine)
    with closed_on_error() as opened:
        media = build_media(files, config)
        opened.callback(media.close)
        return build_intake(files, runtime, media)
