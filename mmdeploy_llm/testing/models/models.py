"""Checks of a model by itself: building, loading, and the shapes of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint, MediaSpan, ModelSpec
from mmdeploy_llm.hooks.factories import missing_parts
from mmdeploy_llm.hooks.objects.model import cross_of, media_size
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.models.paged import PagedRunner
from mmdeploy_llm.testing.models.reference import Reference
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.load import build_model

from .base import Check, CheckFailed, CheckSkipped, attributed, demand, factory_of

UNKNOWN_KEY = "no_model_has.this_key.weight"
MAX_COPY_BYTES = 256 * 2**20  # a larger checkpoint is not copied to remove a key from it

Grid = tuple[int, int, int]
Prompt = tuple[list[int], list[MediaSpan]]


@dataclass(kw_only=True)
class ModelSubject:
    """A model to check; see ModelConformance for the fields."""

    spec: ModelSpec
    folder: Path
    config: Any
    cases: Mapping[str, Sequence[Grid]]
    tolerance: float
    make_prompt: Callable[..., Prompt]
    make_reference: Callable[[Path], Any]
    bf16_tolerance: float = 0.15
    messages: Sequence[Any] | None = None
    chat_reference: Callable[..., Any] | None = None

    @cached_property
    def reference(self) -> Any:
        """The reference model of the folder, by default transformers'."""
        return self.make_reference(self.folder)

    @cached_property
    def model(self) -> Any:
        """The plugin's model with its weights, in float32."""
        return self.build(torch.float32)

    @cached_property
    def runner(self) -> DenseRunner:
        """The plugin's model with plain attention, without a paged cache."""
        return DenseRunner(self.model, has_atomic_media=self.spec.atomic_media)

    @cached_property
    def prompts(self) -> dict[str, Prompt]:
        """One prompt per case, by its name."""
        return {
            name: self.make_prompt(self.config, grids, seed=seed)
            for seed, (name, grids) in enumerate(self.cases.items())
        }

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.config.get_text_config().vocab_size)

    def build(
        self,
        dtype: torch.dtype,
        load_format: Any = "safetensors",
        folder: Path | None = None,
        split: Any = None,
    ) -> Any:
        """Builds another instance of the plugin's model on the CPU. split: see build_model."""
        checkpoint = Checkpoint(folder=folder or self.folder, config=self.config)
        cpu = torch.device("cpu")
        return build_model(factory_of(self.spec), checkpoint, dtype, cpu, load_format, split)

    def paged(self, **limits: Any) -> PagedRunner:
        """Returns the plugin's model driven by the real scheduler and runner."""
        media = [span for _, spans in self.prompts.values() for span in spans]
        if self.spec.atomic_media and "max_num_batched_tokens" in limits:
            largest = max((span.end - span.offset for span in media), default=0)
            limits["max_num_batched_tokens"] = max(largest, limits["max_num_batched_tokens"])
        return PagedRunner(
            self.model,
            vocab_size=self.vocab_size,
            longest=max(len(ids) for ids, _ in self.prompts.values()),
            encoder_cache_tokens=sum(span.item.num_tokens for span in media),
            has_atomic_media=self.spec.atomic_media,
            **limits,
        )


def builds_on_meta(subject: ModelSubject) -> None:
    """The factory builds the whole model on the meta device, without allocating memory."""
    factory = factory_of(subject.spec)
    with (
        attributed(
            f"{subject.spec.factory}(config) on the meta device",
            "build from the config alone, create empty parameters, read no values while building: "
            "parameters have none yet",
        ),
        torch.device("meta"),
    ):
        model = factory(subject.config)
    demand(
        isinstance(model, torch.nn.Module),
        f"{subject.spec.factory} returns a {type(model).__name__}; return a torch.nn.Module",
    )
    real = [name for name, param in model.named_parameters() if param.device.type != "meta"]
    demand(
        not real,
        f"{_some(real)} allocated memory while building on the meta device; create parameters "
        "with torch.empty, without `device=` and values",
    )


def has_what_the_engine_asks_for(subject: ModelSubject) -> None:
    """The model has the methods and sizes of the Model protocol."""
    with torch.device("meta"):
        model = factory_of(subject.spec)(subject.config)
    missing = missing_parts(subject.spec, model)
    demand(
        not missing,
        f"{type(model).__name__} lacks {', '.join(missing)}; the Model protocol in "
        "mmdeploy_llm.hooks describes each of them (sizes are ints)",
    )


def loads_the_checkpoint(subject: ModelSubject) -> None:
    """Every key of the checkpoint has a parameter or is ignored, and every parameter has a key."""
    try:
        _ = subject.model
    except CheckpointError as error:
        raise CheckFailed(
            f"the checkpoint does not load: {error}. In the model, name the keys that it needs in "
            "weight_targets (usually WeightMap's `renames`), and keys that it does not need in "
            "`ignored`"
        ) from error


def unknown_keys_are_refused(subject: ModelSubject) -> None:
    """An unknown key is an error and is not ignored."""
    with torch.device("meta"):
        model = factory_of(subject.spec)(subject.config)
    targets = model.weight_targets(UNKNOWN_KEY)
    demand(
        targets is None,
        f"weight_targets({UNKNOWN_KEY!r}) returns {targets!r}; return None for a key that the "
        "model does not know, so that a checkpoint of another kind is refused (() is for known "
        "keys that are not needed: narrow the patterns in `ignored`)",
    )


def missing_keys_are_refused(subject: ModelSubject) -> None:
    """A checkpoint without a key that the model reads is an error."""
    paths = find_weights(subject.folder)
    if sum(path.stat().st_size for path in paths) > MAX_COPY_BYTES:
        raise CheckSkipped("the checkpoint is too large to be copied")
    tensors = {key: value for path in paths for key, value in load_file(path).items()}
    wanted = [key for key in tensors if subject.model.weight_targets(key)]
    demand(
        wanted,
        "the model reads no key of the checkpoint, so none can be missing; make its weights "
        "parameters, and return them from weight_targets",
    )
    for key in (wanted[0], wanted[-1]):
        rest = {name: tensor for name, tensor in tensors.items() if name != key}
        with TemporaryDirectory() as folder:
            save_file(rest, Path(folder) / "model.safetensors")
            try:
                subject.build(torch.float32, folder=Path(folder))
            except CheckpointError:
                continue
        raise CheckFailed(
            f"the checkpoint loads even without {key!r}, which the model reads; make every weight "
            "a parameter when the model is built"
        )


def ignored_keys_are_not_needed(subject: ModelSubject) -> None:
    """No ignored key is a parameter with which transformers' model computes its logits."""
    ignored = [key for key in _keys(subject.folder) if subject.model.weight_targets(key) == ()]
    if not ignored:
        return
    inner = getattr(subject.reference, "model", None)
    if not isinstance(inner, torch.nn.Module):
        raise CheckSkipped("the reference has no torch module with parameters")
    # A tied output head is listed once, under the embedding's name.
    used = dict(inner.named_parameters())
    reads = getattr(subject.reference, "reads", lambda parameter, prompts: True)
    prompts = list(subject.prompts.values())
    needed = [key for key in ignored if key in used and reads(used[key], prompts)]
    demand(
        not needed,
        f"{_some(needed)} are ignored, but transformers' model computes with them; return targets "
        "for them from weight_targets, or narrow the patterns in `ignored`",
    )


def dummy_weights_give_finite_logits(subject: ModelSubject) -> None:
    """A model with load_format="dummy" reads no file and computes finite logits."""
    model = subject.build(torch.float32, "dummy")
    runner = DenseRunner(model, has_atomic_media=subject.spec.atomic_media)
    ids, media = subject.make_prompt(subject.config, (), seed=0)
    demand(
        runner.run(runner.add(ids, media)).isfinite().all(),
        "with dummy weights the logits are not finite; compute buffers in init_buffers(device), "
        "and guard divisions and logarithms",
    )


def shapes_are_right(subject: ModelSubject) -> None:
    """forward, logits, positions and encode_media return the shapes of their contract."""
    model, runner = subject.model, subject.runner
    for name, (ids, media) in subject.prompts.items():
        _check_positions(model, name, ids, media)
        _check_embeddings(model, name, media)
        sequence = runner.add(ids, media)
        with torch.inference_mode(), attributed(f"case {name!r}: forward", "see the traceback"):
            hidden = model.forward(runner._inputs([(sequence, len(ids))]))
            logits = model.logits(hidden[-2:])
        for what, found, shape in (
            ("forward", hidden, (len(ids), model.hidden_size)),
            ("logits", logits, (2, subject.vocab_size)),
        ):
            given = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            demand(
                given == shape,
                f"case {name!r}: {what} returns {given}, must be {shape}; "
                "hidden states are [tokens, hidden_size], logits [rows, vocab_size]",
            )
            demand(
                found.dtype == torch.float32,
                f"case {name!r}: {what} returns {found.dtype} for float32 weights; keep the dtype",
            )


def encoding_together_equals_one_by_one(subject: ModelSubject) -> None:
    """encode_media returns the same embeddings for an item alone and among others."""
    items = [span.item for _, media in subject.prompts.values() for span in media]
    if not items:
        raise CheckSkipped("no case has media")
    model = subject.model  # loaded here: tensors of inference mode take no transposed weights
    with torch.inference_mode():
        together = model.encode_media(items)
        for item, embed in zip(items, together, strict=True):
            (alone,) = model.encode_media([item])
            error = float((embed.float() - alone.float()).abs().max())
            demand(
                error < subject.tolerance,
                f"the embeddings of {item.key!r} differ by {error:.2g} when it is encoded among "
                "others; restrict the encoder's attention and pooling to each item",
            )


def transformers_reference(folder: Path) -> Any:
    """Loads transformers' model of the folder. Raises CheckSkipped when transformers has none."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture = config.architectures[0]
    if not hasattr(transformers, architecture):
        raise CheckSkipped(
            f"transformers has no {architecture}; return your own reference in `make_reference`"
        )
    return Reference(folder)


def _check_positions(model: Any, name: str, ids: Sequence[int], media: Sequence[MediaSpan]) -> None:
    positions = model.positions(len(ids), media)
    if positions is None:
        return
    first = model.positions(1, ())
    num_axes = 3 if first is None or first.dim() != 2 else len(first)
    demand(
        isinstance(positions, torch.Tensor)
        and positions.dtype is torch.int64
        and tuple(positions.shape) == (num_axes, len(ids)),
        f"case {name!r}: positions returns {_shape(positions)}; return None, or int64 of shape "
        f"{(num_axes, len(ids))} (time, height, width)",
    )


def _check_embeddings(model: Any, name: str, media: Sequence[MediaSpan]) -> None:
    if not media:
        return
    with torch.inference_mode(), attributed(f"case {name!r}: encode_media", "see the traceback"):
        embeds = model.encode_media([span.item for span in media])
    demand(
        len(embeds) == len(media),
        f"case {name!r}: encode_media returns {len(embeds)} outputs for {len(media)} items; return "
        "one per item, in order",
    )
    for span, embed in zip(media, embeds, strict=True):
        shape: tuple[int, ...] = (span.item.num_tokens, media_size(model))
        if (cross := cross_of(model)) is not None:
            shape = cross.shape(span.item.num_tokens)
        demand(
            tuple(embed.shape) == shape,
            f"case {name!r}: encode_media returns {tuple(embed.shape)} for an item of "
            f"{span.item.num_tokens} tokens, must be {shape} (num_tokens, media_size or "
            "hidden_size); the processor's num_tokens and the encoder's merging must agree",
        )


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def _keys(folder: Path) -> Iterator[str]:
    for path in find_weights(folder):
        with SafetensorsFile(path) as file:
            yield from file.entries


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


CHECKS: tuple[Check, ...] = (
    builds_on_meta,
    has_what_the_engine_asks_for,
    loads_the_checkpoint,
    unknown_keys_are_refused,
    missing_keys_are_refused,
    ignored_keys_are_not_needed,
    dummy_weights_give_finite_logits,
    shapes_are_right,
    encoding_together_equals_one_by_one,
)
