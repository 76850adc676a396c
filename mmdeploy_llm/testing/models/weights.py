"""The check that a model computes with every tensor that it loads: one that is read and forgotten
shows in no comparison of logits where its values are neutral, such as a norm's ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.map import Target

from .base import Check, CheckSkipped, attributed, demand, since
from .dense import DenseRunner
from .equalities import max_difference
from .models import MAX_COPY_BYTES, ModelSubject, Prompt, _some


@since(1, 2)
def every_weight_counts(subject: ModelSubject) -> str | None:
    """The logits change with each tensor of the checkpoint that the model reads, unless those of
    the reference do not."""
    paths = find_weights(subject.folder)
    if sum(path.stat().st_size for path in paths) > MAX_COPY_BYTES:
        raise CheckSkipped("the checkpoint is too large to be changed tensor by tensor")
    tensors = {key: tensor for path in paths for key, tensor in load_file(path).items()}
    silent = _Ours(subject).silent(tensors)
    if not silent:
        return None
    lost = _lost(subject, tensors, silent)
    demand(
        not lost,
        f"the model loads {_some(lost)} and its logits do not change with it, as those of the "
        "reference do; compute with every parameter",
    )
    return f"no case reaches {_some(silent)}; prompts in `cases` that need it would test it"


class _Ours:
    """A model of its own, whose weights are changed in place: modules may keep what they derive
    from the weights of the subject's."""

    def __init__(self, subject: ModelSubject, folder: Path | None = None) -> None:
        self._model = subject.build(torch.float32, folder=folder)
        self._runner = DenseRunner(self._model, has_atomic_media=subject.spec.atomic_media)
        self._prompts = sorted(subject.prompts.values(), key=lambda prompt: len(prompt[0]))
        with attributed("forward", "see the traceback"):
            self.logits = [self._run(prompt) for prompt in self._prompts]

    def _run(self, prompt: Prompt) -> Tensor:
        return self._runner.run(self._runner.add(*prompt))

    def silent(self, keys: Iterable[str]) -> list[str]:
        """Returns the keys that the model reads and that change no logit."""
        params = dict(self._model.named_parameters())
        found = []
        for key in keys:
            targets: Sequence[Target] = self._model.weight_targets(key) or ()
            parts = [_part(params[target.name].data, target) for target in targets]
            if parts and not self._is_heard(parts):
                found.append(key)
        return found

    def _is_heard(self, parts: Sequence[Tensor]) -> bool:
        kept = [part.clone() for part in parts]
        for part in parts:
            part.add_(_noise(part))
        runs = zip(self.logits, self._prompts, strict=True)
        is_heard = any(not torch.equal(before, self._run(prompt)) for before, prompt in runs)
        for part, own in zip(parts, kept, strict=True):
            part.copy_(own)
        return is_heard


def _part(param: Tensor, target: Target) -> Tensor:
    """Returns the values of a parameter that a tensor of the checkpoint fills."""
    param = param if target.index is None else param[target.index]
    return param if target.rows is None else param[target.rows]


def _noise(tensor: Tensor) -> Tensor:
    """Returns random values, always the same, of the shape and dtype of a tensor."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def _lost(subject: ModelSubject, tensors: dict[str, Tensor], silent: list[str]) -> list[str]:
    """Returns the keys of which the reference's logits depend and the model's do not. Raises
    CheckSkipped when there is no reference."""
    try:
        before = _reference_logits(subject, subject.folder)
    except CheckSkipped as reason:
        raise CheckSkipped(f"no logit changes with {_some(silent)}; {reason}") from None
    ours = _Ours(subject).logits

    def changes(keys: Sequence[str]) -> tuple[bool, bool]:
        """Whether the reference's logits change with these tensors, and whether the model's do."""
        with TemporaryDirectory() as name:
            folder = _changed(subject, tensors, keys, Path(name))
            pairs = zip(before, _reference_logits(subject, folder), strict=True)
            has_moved = any(not max_difference(*pair) < subject.tolerance for pair in pairs)
            is_same = all(map(torch.equal, ours, _Ours(subject, folder).logits))
        return has_moved, not is_same

    has_moved, _ = changes(silent)
    return [key for key in silent if changes([key]) == (True, False)] if has_moved else []


def _reference_logits(subject: ModelSubject, folder: Path) -> list[Tensor]:
    reference: Any = subject.make_reference(folder)
    return [reference.logits(*prompt) for prompt in subject.prompts.values()]


def _changed(
    subject: ModelSubject, tensors: dict[str, Tensor], keys: Sequence[str], folder: Path
) -> Path:
    """Writes the checkpoint with other values of these tensors."""
    weights = {path.name for path in find_weights(subject.folder)}
    for path in subject.folder.iterdir():
        if path.name not in weights and not path.name.endswith(".index.json"):
            (folder / path.name).symlink_to(path.resolve())
    other = {key: tensors[key] + _noise(tensors[key]) for key in keys}
    save_file({**tensors, **other}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


CHECKS: tuple[Check, ...] = (every_weight_counts,)
