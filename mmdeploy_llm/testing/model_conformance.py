"""ModelConformance: what every model must satisfy, as a pytest class to subclass.

class TestMyModel(ModelConformance):
    spec = provide_models()[0]

    @staticmethod
    def write(folder):
        tokenizer = make_tokenizer()
        write_checkpoint(MyConfig(vocab_size=len(tokenizer), ...), folder, tokenizer=tokenizer)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from mmdeploy_llm.hooks import Checkpoint, MediaSpan, ModelSpec
from mmdeploy_llm.intake.checkpoint import read_checkpoint
from mmdeploy_llm.weights import build_model

from .checks import equalities, models, ranks
from .checks.base import factory_of
from .checks.equalities import max_difference
from .checks.models import Grid, ModelSubject
from .conformance import Conformance
from .dense import DenseRunner
from .prompts import make_prompt

__all__ = ["Grid", "ModelConformance", "build", "make_prompt", "max_difference"]

TEXT_CASES: Mapping[str, Sequence[Grid]] = MappingProxyType({"text": (), "other text": ()})


class ModelConformance(Conformance):
    """spec: the family. write: writes a tiny float32 checkpoint with random weights into the
    folder, see `write_checkpoint`.

    cases: name -> the grids of a prompt's media (one frame is an image, more a video); texts only
    by default. tolerance: largest difference of float32 logits. make_prompt, make_reference: to be
    replaced where the family's prompts look otherwise, or transformers does not have the model.
    """

    checks = models.CHECKS + equalities.CHECKS + ranks.CHECKS
    spec: ClassVar[ModelSpec]
    cases: ClassVar[Mapping[str, Sequence[Grid]]] = TEXT_CASES
    tolerance: ClassVar[float] = 1e-4

    @staticmethod
    def write(folder: Path) -> None:
        """To be overridden."""
        raise NotImplementedError("a subclass of ModelConformance says how to write a checkpoint")

    @staticmethod
    def make_prompt(
        config: Any, grids: Sequence[Grid], *, seed: int = 0
    ) -> tuple[list[int], list[MediaSpan]]:
        """Token ids and media of one case; the config is transformers'."""
        return make_prompt(config, grids, seed=seed)

    @staticmethod
    def make_reference(folder: Path) -> Any:
        """What the model must equal: an object with `logits(ids, media)` [tokens, vocab] and
        `generate(ids, num_tokens, media)`; transformers' own model by default. Raises
        CheckSkipped when there is none."""
        return models.transformers_reference(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint, written once."""
        folder = tmp_path_factory.mktemp(cls.spec.name)
        cls.write(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, folder: Path) -> ModelSubject:
        """What the checks get."""
        return ModelSubject(
            spec=cls.spec,
            folder=folder,
            config=read_checkpoint(folder).config,
            cases=cls.cases,
            tolerance=cls.tolerance,
            make_prompt=cls.make_prompt,
            make_reference=cls.make_reference,
        )

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, subject: ModelSubject) -> Any:
        """transformers' model."""
        return subject.reference

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, subject: ModelSubject) -> DenseRunner:
        """Our model, float32, without an engine."""
        return subject.runner

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls, subject: ModelSubject) -> list[tuple[list[int], list[MediaSpan]]]:
        """One prompt per case."""
        return list(subject.prompts.values())


def build(
    spec: ModelSpec, folder: Path, config: Any, dtype: torch.dtype, load_format: Any = "safetensors"
) -> Any:
    """The spec's model with the weights of `folder`, on the CPU."""
    checkpoint = Checkpoint(folder=folder, config=config)
    return build_model(factory_of(spec), checkpoint, dtype, torch.device("cpu"), load_format)
