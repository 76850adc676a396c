"""EngineClient: a model at a desk, with the calls that LLM and AsyncLLM have in common."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.engine.desk.desk import DeskStats
from mmdeploy_llm.engine.intake.defaults import usual_params
from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.errors import EngineError, RequestError
from mmdeploy_llm.media.boxes.reading import Box, FoundBoxes
from mmdeploy_llm.media.loading.cache import CacheStats
from mmdeploy_llm.messages import Conversation, Prompt
from mmdeploy_llm.system.processes import finalize_here, without_collections
from mmdeploy_llm.values.adapter_ref import AdapterRef, LoRARequest
from mmdeploy_llm.values.closing import closed_on_error
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.forms import table_of, told
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.weights.folder import look_up
from mmdeploy_llm.weights.read_ahead import read_ahead

from .arguments import as_prompt
from .belonging import Belonging

if TYPE_CHECKING:  # it imports torch
    from mmdeploy_llm.hooks import Model


class EngineClient(Belonging):
    """Base of LLM and AsyncLLM, which document plugins, model, runtime and num_kv_blocks."""

    def __init__(
        self, config: EngineConfig, step_lock: AbstractContextManager[None] | None = None
    ) -> None:
        """step_lock: entered for each step, where models share the cores."""
        super().__init__()
        self._tokenizer: Any = None
        self._config, self._step_lock = config, step_lock
        self._loading = threading.Lock()  # of adapters that requests bring with them
        self._open(config.quiet)

    def _open(self, quiet: bool) -> None:
        look_up(self._config)
        read_ahead(self._config.model, self._config)
        with without_collections():
            # They import torch, which `from mmdeploy_llm import LLM` need not wait for.
            from mmdeploy_llm.engine.desk.many import open_desk
            from mmdeploy_llm.engine.startup.start import report_load

            self._desk = open_desk(self._config, self._step_lock)
        with closed_on_error() as opened:
            opened.callback(self._desk.close)
            # The desk ends with this object; with the program it ends by itself.
            self._stop = finalize_here(self, self._desk.stop, at_exit=False)
            self.plugins = self._desk.plugins
            self.runtime, self.num_kv_blocks = self._desk.runtime, self._desk.num_kv_blocks
            report_load(self.runtime, self.num_kv_blocks, quiet=quiet)

    def _facts(self) -> dict[str, str]:
        runtime, blocks = self.runtime, self.num_kv_blocks
        state = "dead" if self.death is not None else "closed" if self._desk.is_closed else "open"
        size = runtime.block_size
        cache = f"{blocks:,} blocks of {size} tokens, {blocks * size:,} in all"
        if self._desk.abilities.is_bidirectional:
            cache = "none: each prompt is computed in one step"
        return {
            "state": state,
            "computes": f"{runtime.dtype} on {runtime.device}, {runtime.num_threads} threads",
            "prompts": f"at most {runtime.max_model_len:,} tokens each, "
            f"{runtime.max_num_seqs:,} at once",
            "KV cache": cache,
        }

    def __repr__(self) -> str:
        return told(self._title, self._facts())

    def _repr_html_(self) -> str:
        """Shows the model as a table in a notebook."""
        return table_of(self._title, self._facts())

    @property
    def _title(self) -> str:
        return f"{type(self).__name__}({self.runtime.options.model!r})"

    @property
    def model(self) -> Model | None:
        """The loaded module, None when other processes hold it, and after `close`."""
        return self._desk.model

    @property
    def death(self) -> EngineError | None:
        """Why the engine, of several the last one, can compute nothing any more; None while it
        can."""
        return self._desk.death

    @property
    def num_dead(self) -> int:
        """Engines that have died while others go on."""
        return self._desk.num_dead

    def revive(self) -> None:
        """Starts engines in place of those that have died while others go on. Raises what making
        the object raises."""
        self._home.check()
        self._desk.revive()

    def restart(self) -> None:
        """Starts an engine with the same options in place of this one, which is closed: what it
        computes ends as errors. Observers that were registered with `plugins` are not called by the
        new one. Raises what making the object raises."""
        self._home.check()
        self._stop()  # which also lets go of the desk
        self.close()
        self._open(quiet=True)

    def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model, the same object in every call. It is a
        copy: settings of it, such as padding, have no effect on prompts given as text."""
        self._home.check()
        if self._tokenizer is None:
            self._tokenizer = self._desk.copy_tokenizer()
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the values that open options have: those of the model's generation_config.json,
        else the defaults. `replace(max_tokens=64)` of it makes a changed copy."""
        return usual_params(self.runtime.generation)

    def count_tokens(self, prompt: Prompt | Conversation) -> TokenCount:
        """Counts prompt and media tokens without generating. Raises RequestError for a prompt that
        cannot be prepared."""
        self._home.check()
        return self._desk.count_tokens(as_prompt(prompt))

    def boxes(self, output: RequestOutput, index: int = 0) -> list[Box]:
        """Returns the boxes that an answer about one picture has, in pixels of the picture as it is
        shown, EXIF orientation applied. index: of the completion.

        The header of the picture is read again, so the prompt must still lead to it. Raises
        RequestError for a model whose plugin does not say how it writes boxes, and for a prompt
        with other media than one picture.
        """
        return self.find_boxes(output.item, output.outputs[index].text).boxes

    def find_boxes(self, prompt: Prompt | Conversation, text: str) -> FoundBoxes:
        """Returns the boxes in the text of an answer to a prompt, as `boxes` does, with the size of
        the picture."""
        self._home.check()
        return self._desk.boxes(as_prompt(prompt), text)

    @property
    def adapters(self) -> Mapping[str, AdapterRef]:
        """The LoRA adapters that prompts may name."""
        self._home.check()
        return self._desk.adapters()

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> AdapterRef:
        """Makes a LoRA adapter known by a name, also while prompts are computed: it is checked now,
        and read again when a prompt needs it. A name that is known gets these files; prompts that
        are here already keep the others. folder: a PEFT folder, or an id on the hub. Raises
        ConfigError, and CheckpointError for what is wrong with it or cannot be served."""
        self._home.check()
        ref = self._desk.load_adapter(name, os.fspath(folder))
        self._keep_adapters({name: os.fspath(folder)})
        return ref

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter and frees its memory. Raises RequestError for an unknown one, for the
        default one, and while prompts use it."""
        self._home.check()
        if name and name == self._config.default_adapter:
            raise RequestError(
                f"{name!r} is the default adapter, with which prompts that name none are computed; "
                "leave it, or open the model again without default_adapter"
            )
        self._desk.unload_adapter(name)
        self._keep_adapters({}, name)

    load_lora = load_adapter
    unload_lora = unload_adapter

    def _keep_adapters(self, more: Mapping[str, str], without: str | None = None) -> None:
        """Notes which adapters `restart` has."""
        known = {name: own for name, own in self._config.adapters.items() if name != without}
        self._config = self._config.model_copy(update={"adapters": {**known, **more}})

    def _adapter(self, adapter: Any) -> str:
        """Returns the name of an adapter, that of a LoRARequest after it was loaded; "" for None.
        Raises TypeError for anything else."""
        if isinstance(adapter, LoRARequest):
            name, source = adapter.lora_name, os.fspath(adapter.lora_path)
            with self._loading:  # threads that ask for the same files load them once
                if source and self._config.adapters.get(name) != source:
                    self.load_adapter(name, source)
            return name
        if adapter is not None and not isinstance(adapter, str):
            kind = type(adapter).__name__
            raise TypeError(f"adapter must be the name of an adapter or a LoRARequest, got {kind}")
        return adapter or ""

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the model to a folder that LLM, transformers and vLLM load: weights in few bits as
        compressed-tensors (pack-quantized), others as they are, with config, tokenizer and
        processors' files. It is read again from the files that were loaded, which must not have
        changed.

        Weights that `quantization` rounded to 4 bits, or to 8 by int8wo, are saved as their codes.
        Loaded with the same `quantization`, the folder gives the same tokens to the last bit;
        without it, what is not stored in few bits stays in floats: an output head that shares the
        weights of the embeddings, and the activations that int4 and int4a8 round. A checkpoint that
        was quantised already is copied.
        overwrite: replace a folder that holds a model. Raises ConfigError for a folder that cannot
        be written to, and for quantization = "int8", dummy weights and GGUF files.
        """
        from mmdeploy_llm.checkpoints.saving import save_loaded

        self._home.check()
        save_loaded(self._config, self.runtime, Path(folder), overwrite=overwrite)

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Returns hits, misses and bytes of the media caches, summed over all engines: "processed"
        items, and items "fetched" by URL."""
        self._home.check()
        return self._desk.cache_stats()

    def stats(self) -> DeskStats:
        """Returns the counters of this moment: running, waiting, tokens per second, hits of the
        prefix cache, free blocks. Of several engines, their sums."""
        self._home.check()
        return self._desk.stats()

    def close(self) -> None:
        """Stops the engine and its threads and frees the model. The object cannot be used again.

        May be called twice, and from any thread: calls that run in others end with EngineError, and
        requests that run as errors, after the step that is being computed.
        """
        self._desk.close()
