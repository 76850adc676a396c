"""Checks of a model with other configs than its author's: rope scalings, windows, heads, biases and
constants that the config class knows, each against the reference.

A model reads a key or refuses it (ModelNotSupportedError); one that ignores it answers nonsense for
the first checkpoint that sets it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.errors import ConfigError, ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint, MediaSpan
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.testing.tiny import randomize
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.folder import read_checkpoint
from mmdeploy_llm.weights.load import build_model

from .base import Check, CheckSkipped, attributed, demand, factory_of, since
from .dense import DenseRunner
from .equalities import max_difference
from .models import MAX_COPY_BYTES, ModelSubject

WINDOW = 5  # tokens, fewer than a prompt has
ORIGINAL = 8  # positions of the training, fewer than a prompt has
BIASES = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "o_proj_bias")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
# Fields of a config that other checks change, that training reads, or that name tokens; and alibi,
# whose biases transformers' plain attention adds twice in some families.
NO_CONSTANT = re.compile(
    r"(_token_id|_token|_index|_dropout|_dropout_rate|_coef|_loss|_std|_range|_momentum|_version)$"
    r"|dropout|drop_path|initializer|^use_cache$|^output_|^return_|checkpointing|^pretraining_tp$"
    r"|position_embeddings$|^sliding_window$|^num_key_value_heads$|^tie_word_embeddings$|^num_labels$|^alibi$|^is_decoder$"
)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
SCALINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "yarn": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2 * ORIGINAL,
        },
        "linear": {"rope_type": "linear", "factor": 2.5},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another config. change: changes the text config in place; returns why there is no such
    config, or None. has_other_weights: whether the shapes of weights change. is_of_all: whether
    the whole config is changed, and compared with the media of the cases."""

    name: str
    change: Callable[[Any], str | None]
    has_other_weights: bool = False
    is_of_all: bool = False


def rope_scalings_equal_the_reference(subject: ModelSubject) -> str:
    """The logits equal the reference's with scalings of the rotary embedding and another base, or
    the model refuses the config."""
    return _compare(subject, [*map(_scaling, SCALINGS), Variant(name="rope_theta", change=_base)])


def windows_equal_the_reference(subject: ModelSubject) -> str:
    """The logits equal the reference's with a window that is shorter than the prompt, or the model
    refuses the config."""
    return _compare(subject, [Variant(name="sliding_window", change=_window)])


def key_heads_equal_the_reference(subject: ModelSubject) -> str:
    """The logits equal the reference's with one key head for all query heads (MQA) and with one for
    each (MHA), or the model refuses the config."""
    num_heads = getattr(subject.config.get_text_config(), "num_attention_heads", 1)
    numbers = {"one key head": 1, "a key head for each query head": num_heads}
    return _compare(subject, [_heads(name, number) for name, number in numbers.items()])


def heads_and_biases_equal_the_reference(subject: ModelSubject) -> str:
    """The logits equal the reference's with the output head tied where it was not, or the other way
    round, and with each bias switched, or the model refuses the config."""
    text = subject.config.get_text_config()
    biases = [name for name in BIASES if isinstance(getattr(text, name, None), bool)]
    tied = Variant(name="tie_word_embeddings", change=_tied, has_other_weights=True)
    return _compare(subject, [tied, *map(_bias, biases)])


def constants_equal_the_reference(subject: ModelSubject) -> str:
    """The logits equal the reference's with another epsilon of the norms and another activation, or
    the model refuses the config."""
    text = subject.config.get_text_config()
    found = [name for name in EPSILONS if isinstance(getattr(text, name, None), float)]
    acts = [name for name in ACTIVATIONS if isinstance(getattr(text, name, None), str)]
    return _compare(subject, [*map(_epsilon, found), *map(_activation, acts)])


@since(1, 2)
def every_constant_is_read(subject: ModelSubject) -> str:
    """The logits equal the reference's with another value of each number and switch of the config
    on which no shape of a weight depends, or the model refuses the config."""
    _demand_small(subject)
    config = subject.config
    found = [
        _constant(part, name, value)
        for part in _parts(config)
        for name, value in _own(config, part)
    ]
    shapes = _shapes(config)
    return _compare(subject, [one for one in found if _keeps(config, one, shapes)])


def _parts(config: Any) -> list[str | None]:
    """Returns the names of a config's parts, None for the config itself."""
    return [None, *(name for name in config.sub_configs if getattr(config, name, None) is not None)]


def _part(config: Any, name: str | None) -> Any:
    return config if name is None else getattr(config, name)


def _own(config: Any, part: str | None) -> list[tuple[str, Any]]:
    """Returns fields and values of a part, the numbers and switches that only this model has, and
    that no other check changes."""
    section = _part(config, part)
    taken = set(transformers.PreTrainedConfig().to_dict())
    is_text = section is config.get_text_config()
    taken |= {*BIASES, *EPSILONS} if is_text else set()
    # Whole numbers of encoders are their sizes, of which there are many.
    kinds = (bool, float) if config.sub_configs and not is_text else (bool, float, int)
    return [
        (name, value)
        for name, value in section.to_dict().items()
        if (type(value) in kinds and name not in taken and not NO_CONSTANT.search(name))
    ]


def _constant(part: str | None, name: str, value: Any) -> Variant:
    other = value * 1.37 + 0.013 if isinstance(value, float) else value + 1
    other = not value if isinstance(value, bool) else other

    def change(config: Any) -> str | None:
        setattr(_part(config, part), name, other)
        return None

    full = name if part is None else f"{part}.{name}"
    return Variant(name=f"{full} = {other}", change=change, is_of_all=True)


def _shapes(config: Any) -> Mapping[str, Any] | None:
    """Returns the shapes of the weights of transformers' model; None where it makes none."""
    architecture: Any = getattr(transformers, (config.architectures or ("",))[0], None)
    try:
        with torch.device("meta"):
            return {name: own.shape for name, own in architecture(config).state_dict().items()}
    except Exception:  # transformers raises whatever its classes raise
        return None


def _keeps(config: Any, variant: Variant, shapes: Mapping[str, Any] | None) -> bool:
    """Whether the weights of a config stay as they are."""
    changed = copy.deepcopy(config)
    try:
        variant.change(changed)
    except Exception:  # its class allows no such value
        return False
    return shapes is not None and _shapes(changed) == shapes


def _scaling(name: str) -> Variant:
    def change(text: Any) -> str | None:
        return _set_rope(text, **SCALINGS[name])

    return Variant(name=name, change=change)


def _base(text: Any) -> str | None:
    return _set_rope(text, rope_theta=137.0)


def _set_rope(text: Any, **fields: Any) -> str | None:
    """Changes the rotary embedding of all layers, or of those with full attention."""
    found = getattr(text, "rope_parameters", None)
    if not found:
        return "the config has no rope_parameters"
    found = copy.deepcopy(dict(found))
    per_kind = "rope_type" not in found and "rope_theta" not in found
    rope = found.get("full_attention") if per_kind else found
    if not isinstance(rope, dict):
        return "its rope_parameters have no full_attention"
    if "rope_type" in fields and rope.get("rope_type", "default") == fields["rope_type"]:
        return f"it is the config's own ({fields['rope_type']})"
    if "rope_type" in fields and rope.get("rope_type", "default") != "default":
        return f"the config has its own scaling ({rope['rope_type']})"
    rope.update(fields)
    text.rope_parameters = found
    return None


def _window(text: Any) -> str | None:
    """Gives half of the layers a window, where the config class says which have one."""
    if not hasattr(text, "sliding_window"):
        return "the config has no sliding_window"
    if getattr(text, "sliding_window", None) == WINDOW:
        return "it is the config's own"
    kinds = list(getattr(text, "layer_types", None) or ())
    if kinds and "sliding_attention" not in kinds:
        if set(kinds) != {"full_attention"}:
            return "no layer of it has a window"
        text.layer_types = [
            ("sliding_attention", "full_attention")[at % 2] for at in range(len(kinds))
        ]
    if hasattr(text, "use_sliding_window"):
        text.use_sliding_window = True
    text.sliding_window = WINDOW
    return None


def _heads(name: str, number: int) -> Variant:
    def change(text: Any) -> str | None:
        try:
            now = getattr(text, "num_key_value_heads", None)
        except Exception:  # transformers raises its own error where layers differ in it
            return "num_key_value_heads varies with the layer"
        if not isinstance(now, int):
            return "the config has no num_key_value_heads"
        text.num_key_value_heads = number
        return "it is the config's own" if now == number else None

    return Variant(name=name, change=change, has_other_weights=True)


def _tied(text: Any) -> str | None:
    if not isinstance(getattr(text, "tie_word_embeddings", None), bool):
        return "the config has no tie_word_embeddings"
    text.tie_word_embeddings = not text.tie_word_embeddings
    return None


def _bias(name: str) -> Variant:
    def change(text: Any) -> str | None:
        setattr(text, name, not getattr(text, name))
        return None

    return Variant(name=name, change=change, has_other_weights=True)


def _epsilon(name: str) -> Variant:
    def change(text: Any) -> str | None:
        setattr(text, name, 0.05)
        return None

    return Variant(name=name, change=change)


def _activation(name: str) -> Variant:
    def change(text: Any) -> str | None:
        setattr(text, name, "gelu" if getattr(text, name) != "gelu" else "silu")
        return None

    return Variant(name=name, change=change)


def _compare(subject: ModelSubject, variants: list[Variant]) -> str:
    """Compares each variant; returns which were tried, and why the others were not. Raises
    CheckSkipped when none can be."""
    _demand_small(subject)
    plain = subject.make_prompt(subject.config, (), seed=0)
    richest = max(subject.prompts.values(), key=lambda prompt: len(prompt[1]), default=plain)
    tried, left = [], []
    for variant in variants:
        ids, media = richest if variant.is_of_all and richest[1] else plain
        with TemporaryDirectory() as folder:
            reason = _write(subject, variant, Path(folder)) or _differs(
                subject, variant, Path(folder), list(ids), media
            )
        tried += [variant.name] * (reason is None)
        left += [f"{variant.name}: {reason}"] * (reason is not None)
    if not tried:
        reasons = "; ".join(left) or "the config has none of the keys"
        raise CheckSkipped(f"the family has no such config ({reasons}): nothing to add")
    return "; ".join([f"tried {', '.join(tried)}", *left])


def _demand_small(subject: ModelSubject) -> None:
    if sum(path.stat().st_size for path in find_weights(subject.folder)) > MAX_COPY_BYTES:
        raise CheckSkipped("the checkpoint is too large to make others of its kind: nothing to add")


def _write(subject: ModelSubject, variant: Variant, folder: Path) -> str | None:
    """Writes a checkpoint with the config of the variant; returns why there is none, or None."""
    config = copy.deepcopy(subject.config)
    text = config.get_text_config()
    reason = variant.change(config if variant.is_of_all else text)
    if reason is not None:
        return reason
    if variant.name == "tie_word_embeddings":
        config.tie_word_embeddings = text.tie_word_embeddings
    if not variant.has_other_weights:
        for path in subject.folder.iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path.resolve())
        try:
            config.save_pretrained(folder)
        except Exception as error:  # its class allows no such value
            return f"its config class refuses it ({_first_line(error)})"
        return None
    architecture = getattr(transformers, (config.architectures or ("",))[0], None)
    if architecture is None:
        return "transformers has no such model to write its weights with"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = architecture(config)
            randomize(model)
        model.save_pretrained(folder)
    except Exception as error:  # transformers raises whatever its classes raise
        return f"transformers does not make it ({_first_line(error)})"
    return None


def _differs(
    subject: ModelSubject,
    variant: Variant,
    folder: Path,
    ids: list[int],
    media: Sequence[MediaSpan],
) -> str | None:
    """Compares the logits; returns why they cannot be compared, None when they are equal."""
    try:
        expected: Tensor = subject.make_reference(folder).logits(ids, media)
    except CheckSkipped:
        raise
    except Exception as error:  # transformers knows no such config
        return f"the reference does not run it ({_first_line(error)})"
    if (
        not variant.has_other_weights
        and max_difference(expected, subject.reference.logits(ids, media)) < subject.tolerance
    ):
        return "it changes nothing in the reference"
    told = "" if variant.is_of_all else f" ({_told(subject, folder)})"
    what = f"with {variant.name}{told}"
    checkpoint = read_checkpoint(folder)
    with attributed(f"a model {what}", "read it from the config, or raise ModelNotSupportedError"):
        try:
            model = _built(subject, checkpoint)
        except (ModelNotSupportedError, ConfigError) as error:
            return f"the model refuses it ({error})"
        runner = DenseRunner(model, has_atomic_media=subject.spec.atomic_media)
        found = runner.run(runner.add(ids, media))
    largest = max_difference(found, expected)
    demand(
        largest < subject.tolerance,
        f"{what} the logits differ from the reference's by {largest:.2g}, {subject.tolerance:g} is "
        "allowed; read it from the config, or raise ModelNotSupportedError for what you do not "
        "compute",
    )
    return None


def _first_line(error: Exception) -> str:
    return error_text(error).strip().splitlines()[0][:200]


def _built(subject: ModelSubject, checkpoint: Checkpoint) -> Any:
    cpu = torch.device("cpu")
    return build_model(factory_of(subject.spec), checkpoint, torch.float32, cpu, "safetensors")


def _told(subject: ModelSubject, folder: Path) -> str:
    """Names what the config has that the author's has not."""
    before, after = subject.config.get_text_config(), read_checkpoint(folder).config
    now = after.get_text_config().to_dict()
    return ", ".join(
        f"{name} = {value!r}"
        for name, value in _changed(before.to_dict(), now)
        if not name.startswith("_")
    )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in now.items():
        if before.get(name) != value and name not in ("transformers_version", "dtype"):
            yield name, value


CHECKS: tuple[Check, ...] = (
    rope_scalings_equal_the_reference,
    windows_equal_the_reference,
    key_heads_equal_the_reference,
    heads_and_biases_equal_the_reference,
    constants_equal_the_reference,
    every_constant_is_read,
)
