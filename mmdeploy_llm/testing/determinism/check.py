"""check_determinism: computes prompts in every way on this machine, and says where answers
differ."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from mmdeploy_llm.caches import longest_window
from mmdeploy_llm.engine.intake.intake import Intake
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.schedule.scheduler import SchedulerConfig
from mmdeploy_llm.engine.startup.host import Host
from mmdeploy_llm.engine.startup.loaded import LoadedModel, RankGroup, load_model
from mmdeploy_llm.engine.startup.machine import read_machine
from mmdeploy_llm.engine.startup.media import build_media
from mmdeploy_llm.engine.startup.model_files import ModelFiles, read_model_files
from mmdeploy_llm.engine.startup.options import final_options
from mmdeploy_llm.engine.startup.rooms import build_intake
from mmdeploy_llm.engine.startup.runners import CachePlan, new_runner
from mmdeploy_llm.engine.startup.sizes import kv_cache_shape
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks.names import listing
from mmdeploy_llm.hooks.objects.model import media_size
from mmdeploy_llm.kernels.cpu import THREAD_COUNT
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import SamplingParams

from .ways import Comparison, Way, Ways

WAYS = tuple(way for way in Way if way is not Way.ALONE)
BLOCK_SIZE = 16  # tokens; answers are longer, so that they outgrow a full cache
NUM_TOKENS = 24  # of each answer
SHORT = (5, 23, 67)  # tokens of prompts
HIGHEST_ID = 15_000
FORCED = {"max_num_seqs": 16, "use_warmup": False, "quiet": True, "enforce_eager": True}
QUESTION = "Describe this in detail."
SOUND_RATE = 16_000  # samples of a second


def check_determinism(config: EngineConfig, longest: int) -> Iterator[Comparison]:
    """Yields a comparison for each way other than alone. longest: tokens of the longest prompt.
    Raises ConfigError, ModelError and PluginError when the model cannot be loaded."""
    if config.tensor_parallel_size > 1 or config.data_parallel_size > 1:
        raise ConfigError(
            "the check runs one engine in this process; leave out tensor_parallel_size and "
            "data_parallel_size, which change no bit of what it compares"
        )
    config = config.model_copy(
        update={**FORCED, "block_size": config.block_size or BLOCK_SIZE, "max_logprobs": -1}
    )
    files, machine = read_model_files(config), read_machine(config)
    runtime = final_options(config, files, machine)
    with ExitStack() as stack:
        host = Host(runtime, machine)
        stack.callback(host.close)
        stack.enter_context(THREAD_COUNT.computing(runtime.num_threads))
        loaded = load_model(runtime, files, machine, host.threads, RankGroup())
        if not isinstance(loaded.model, nn.Module):
            raise ConfigError("the model is not a torch.nn.Module: its operations have no names")
        media = build_media(files, config)
        intake = build_intake(files, loaded.runtime, media, media_size=media_size(loaded.model))
        stack.callback(intake.close)
        length = min(longest, loaded.runtime.max_model_len - NUM_TOKENS)
        requests = _requests(files, intake, media, length)
        yield from _ways(loaded, requests).compare(loaded.model, WAYS)


def _ways(loaded: LoadedModel, requests: Sequence[Request]) -> Ways:
    runtime = loaded.runtime
    media = [span for request in requests for span in request.media]
    size = runtime.block_size
    blocks = [-(-(len(each.prompt_token_ids) + NUM_TOKENS) // size) for each in requests]
    limits = SchedulerConfig(
        max_num_seqs=len(requests),
        max_num_batched_tokens=sum(len(each.prompt_token_ids) for each in requests) + len(requests),
        max_model_len=runtime.max_model_len,
        num_blocks=2 * sum(blocks) + 1,
        block_size=size,
        encoder_cache_tokens=sum(span.item.num_tokens for span in media) or 1,
        atomic_media=loaded.files.spec.atomic_media,
        window=longest_window(loaded.model),
        num_window_blocks=2 * sum(blocks) + 1,
    )
    shape = kv_cache_shape(loaded.model, runtime)

    def runner(config: SchedulerConfig) -> Runner:
        plan = CachePlan(
            shape=shape,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            num_window_blocks=config.num_window_blocks,
        )
        return new_runner(loaded, plan)

    return Ways(runner, limits, requests)


def _requests(files: ModelFiles, intake: Intake, media: ModelMedia, longest: int) -> list[Request]:
    """Returns requests for random texts, and for each kind of media that the model accepts and its
    template can write; every other one samples. Of a model that finds no places for media in its
    prompts each has one item, with a text where it takes texts. Raises ConfigError where it takes
    none of these."""
    found: list[Request] = []
    lengths = [min(length, longest) for length in (*SHORT, longest // 2, longest)]
    prompts = [*_texts(files, lengths), *_chats(files, media)]
    if not media.has_places:
        prompts = _readable([*prompts, *_written(media)], intake)
    for prompt in prompts:
        is_random = len(found) % 2 == 1
        params = SamplingParams(
            temperature=0.8 if is_random else 0.0,
            top_p=0.9 if is_random else 1.0,
            seed=len(found),
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=2,
        )
        found += intake.accept(prompt, params)
    if not found:
        raise ConfigError(
            f"this model takes {listing(media.read)}, and the check makes texts, pictures, videos "
            "and sounds only"
        )
    return [replace(request, output_token_ids=[], block_ids=[]) for request in found]


def _texts(files: ModelFiles, lengths: Sequence[int]) -> list[Any]:
    raw = files.tokenizer.raw
    special = {*raw.all_special_ids, *raw.get_added_vocab().values()}
    highest = min(HIGHEST_ID, files.text.vocab_size)
    usable = [token for token in range(highest) if token not in special]
    rng = random.Random(0)
    return [[rng.choice(usable) for _ in range(length)] for length in lengths]


def _chats(files: ModelFiles, media: ModelMedia) -> Iterator[Any]:
    if files.chat_template is None:
        return
    for kind, source in (*_sources(), *_sounds()):
        if kind in media.read:
            content = [{"type": kind, kind: source}, {"type": "text", "text": QUESTION}]
            yield {"messages": [{"role": "user", "content": content}]}


def _written(media: ModelMedia) -> Iterator[Any]:
    """Yields prompts of a model that reads media in an encoder: none of them says where."""
    for kind, source in (*_sources(), *_sounds()):
        if kind in media.read:
            for text in (" ", QUESTION):
                yield {"prompt": text, "multimodal_data": {kind: source}}


def _readable(prompts: Sequence[Any], intake: Intake) -> list[Any]:
    """Returns those of the prompts that the model reads: some models with an encoder take no text,
    others none without a sound or a picture."""
    found = []
    for prompt in prompts:
        with suppress(RequestError):
            intake.accept(prompt, SamplingParams(max_tokens=NUM_TOKENS))
            found.append(prompt)
    return found


def _sources() -> Iterator[tuple[str, Any]]:
    for height, width in ((2, 3), (4, 2)):
        yield "image", _picture(56 * height, 56 * width, seed=height)
    yield "video", [_picture(112, 112, seed=seed) for seed in (7, 8, 9, 10)]


def _sounds() -> Iterator[tuple[str, Any]]:
    for seconds in (1, 2, 3):
        noise = np.random.default_rng(seconds).normal(0, 0.1, seconds * SOUND_RATE)
        yield "audio", {"array": noise.astype(np.float32), "sampling_rate": SOUND_RATE}


def _picture(height: int, width: int, *, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns random RGB noise, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
