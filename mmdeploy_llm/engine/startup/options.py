"""Decides everything that can be decided before the weights are loaded."""

from __future__ import annotations

import logging
from dataclasses import replace

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.layers.attention import select as attention
from mmdeploy_llm.system.guarding.folder_files import shown
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import (
    AttentionChoice,
    AttentionNeeds,
    ModelLimits,
    RuntimeConfig,
    resolve,
)
from mmdeploy_llm.values.options.weight_formats import KEPT_BY_KV_CACHE, kept_by

from .cards import check_device
from .deterministic import check_promise
from .machine import Machine
from .model_files import ModelFiles

logger = logging.getLogger(__name__)

MIN_KEPT = 95  # of 100 tokens, below which few bits are warned of
SMALL = range(2**27, 2**31)  # bytes of weights of the models that this has been measured for
STORED_DTYPES = ("float32", "float16", "bfloat16", "float64")


def final_options(config: EngineConfig, files: ModelFiles, machine: Machine) -> RuntimeConfig:
    """Resolves every option for this model on this machine. Raises ConfigError when an option does
    not fit, the device cannot compute in the dtype or the attention library is not installed,
    PluginError where the attention backend of a plugin cannot be built, and ModelError for a config
    that cannot be used."""
    text = files.text
    if config.dtype == "auto" and text.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"'dtype' in config.json of the model is {shown(text.dtype)}; allowed: "
            f"{', '.join(STORED_DTYPES)}. Set dtype to compute in another"
        )
    limits = ModelLimits(
        dtype=text.dtype,
        max_position_embeddings=text.max_position_embeddings,
        hidden_size=text.hidden_size,
    )
    host = attention_host(machine)

    def choose(needs: AttentionNeeds) -> AttentionChoice:
        own = replace(
            needs,
            head_dims=() if text.head_dim is None else (text.head_dim,),
            media_spans=files.spec.atomic_media,
            deterministic=config.deterministic and needs.device == "cpu",
        )
        choice = attention.select(own, files.plugins, host)
        logger.info(choice.why)
        return choice

    generation = {**files.spec.sampling, **files.checkpoint.generation}
    runtime = replace(resolve(config, limits, machine.limits, choose), generation=generation)
    warn_of_threads(runtime, machine)
    if config.deterministic:
        check_promise(files, runtime)
    check_device(runtime.device, runtime.dtype, machine.cuda, config.tensor_parallel_size)
    # Built once before the weights are read, so that a library that is broken is told early.
    attention.create(runtime.attention_backend, files.plugins, host.setup(attention_needs(runtime)))
    return runtime


def warn_of_loss(runtime: RuntimeConfig, files: ModelFiles) -> None:
    """Warns of few bits that are known to change more than 5 of 100 tokens of a small model."""
    by_name = kept_by(is_cuda=runtime.device != "cpu")
    found = [("kv_cache_dtype", runtime.kv_cache_dtype, KEPT_BY_KV_CACHE)]
    if not files.is_quantized:
        found.append(("quantization", str(runtime.quantization), by_name))
    lossy = [each for each in found if each[2].get(each[1], 100) < MIN_KEPT]
    is_read = runtime.options.load_format != "dummy"
    if not lossy or not is_read or files.stored_bytes not in SMALL:
        return
    nearest = max(by_name, key=by_name.__getitem__)
    for option, value, kept in lossy:
        logger.warning(
            "%s = %r keeps about %d of 100 greedy tokens of a model of 0.1 B parameters, and loses "
            "less of larger ones. quantization = %r keeps %d, a KV cache of 8 bits as many; 4 bits "
            "of `mmdeploy-llm quantize --group-size 32 --calibrate builtin` keep about 80",
            option,
            value,
            kept[value],
            nearest,
            by_name[nearest],
        )


def warn_of_threads(runtime: RuntimeConfig, machine: Machine) -> None:
    """Warns of more threads than there are CPUs: after every product all wait for those that have
    not run yet. Where nothing is asked for, there are never more."""
    if runtime.device == "cpu" and runtime.num_threads > machine.num_cpus:
        logger.warning(
            "num_threads = %d is slower than %d, the CPUs that this process may use at once; leave "
            "num_threads out",
            runtime.num_threads,
            machine.num_cpus,
        )


def attention_host(machine: Machine) -> attention.Host:
    """Returns what the choice of an attention backend asks of the machine."""
    return attention.Host(
        kernels=machine.kernels, capabilities=[card.capability for card in machine.cuda.cards]
    )


def attention_needs(runtime: RuntimeConfig) -> AttentionNeeds:
    """Returns what the options ask of the attention backend."""
    return AttentionNeeds(
        name=runtime.attention_backend,
        device=runtime.device,
        dtype=runtime.dtype,
        kv_cache_dtype=runtime.kv_cache_dtype,
        block_size=runtime.block_size,
        deterministic=runtime.options.deterministic,
    )
