"""ModelConformance: a pytest class that runs the checks of a model.

class TestMyModel(ModelConformance):
    spec = provide_models()[0]

    @staticmethod
    def write(folder):
        tokenizer = make_tokenizer()
        write_checkpoint(MyConfig(vocab_size=len(tokenizer), ...), folder, tokenizer=tokenizer)

ModelVariantConformance runs the few of them that tell one config of a model from another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from mmdeploy_llm.hooks import Checkpoint, MediaSpan, ModelSpec
from mmdeploy_llm.testing.media import chats
from mmdeploy_llm.testing.models import determinism, equalities, models, ranks, variants, weights
from mmdeploy_llm.testing.models.base import factory_of
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.models.equalities import max_difference
from mmdeploy_llm.testing.models.models import Grid, ModelSubject
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.tiny import family_of, write_family
from mmdeploy_llm.weights.folder import read_checkpoint
from mmdeploy_llm.weights.load import build_model

from .conformance import Conformance

__all__ = [
    "Grid",
    "ModelConformance",
    "ModelVariantConformance",
    "build",
    "make_prompt",
    "max_difference",
]

TEXT_CASES: Mapping[str, Sequence[Grid]] = MappingProxyType({"text": (), "other text": ()})


class ModelConformance(Conformance):
    """Tests a model family.

    spec: the family.
    write: writes a tiny float32 checkpoint with random weights, see `write_checkpoint`; by default
        the one that `spec.tiny` describes.
    cases: name -> grids of a prompt's media (one frame is an image, more are a video); by default
        text only.
    tolerance: largest allowed difference of float32 logits.
    bf16_tolerance: largest allowed error of bfloat16 logits, its standard deviation relative to
        that of the logits. Raise it only to what the reference itself has.
    make_prompt: override it if the family's prompts have another form.
    make_reference: override it if transformers does not have the model.
    messages: the conversation that is compared from end to end; by default one with two images.
    chat_reference: override it for `messages` that transformers cannot be asked about here, such as
        some with a video.
    """

    checks = (
        *models.CHECKS,
        *equalities.CHECKS,
        *weights.CHECKS,
        *variants.CHECKS,
        *chats.CHECKS,
        *determinism.CHECKS,
        *ranks.CHECKS,
    )
    spec: ClassVar[ModelSpec]
    cases: ClassVar[Mapping[str, Sequence[Grid]]] = TEXT_CASES
    tolerance: ClassVar[float] = 1e-4
    bf16_tolerance: ClassVar[float] = 0.15
    messages: ClassVar[Sequence[Any] | None] = None

    @classmethod
    def write(cls, folder: Path) -> None:
        """Writes the checkpoint; by default the one that `spec.tiny` describes."""
        if cls.spec.tiny is None:
            raise NotImplementedError(
                "override `write`, which writes a tiny checkpoint to the folder, or give the spec "
                "`tiny`"
            )
        write_family(family_of(cls.spec), folder)

    @staticmethod
    def make_prompt(
        config: Any, grids: Sequence[Grid], *, seed: int = 0
    ) -> tuple[list[int], list[MediaSpan]]:
        """Returns token ids and media of one case. config: transformers' config."""
        return make_prompt(config, grids, seed=seed)

    @staticmethod
    def make_reference(folder: Path) -> Any:
        """Returns the reference: an object with `logits(ids, media)` [tokens, vocab] and
        `generate(ids, num_tokens, media)`; by default transformers' model. Raises CheckSkipped
        when there is none."""
        return models.transformers_reference(folder)

    @staticmethod
    def chat_reference(folder: Path, messages: Sequence[Any], num_tokens: int) -> chats.ChatAnswer:
        """Returns the reference's tokens of a conversation. Raises CheckSkipped when there are
        none."""
        return chats.transformers_chat(folder, messages, num_tokens)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of the checkpoint, written once per class."""
        folder = tmp_path_factory.mktemp(cls.spec.name)
        cls.write(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, folder: Path) -> ModelSubject:
        """The argument of the checks."""
        return ModelSubject(
            spec=cls.spec,
            folder=folder,
            config=read_checkpoint(folder).config,
            cases=cls.cases,
            tolerance=cls.tolerance,
            bf16_tolerance=cls.bf16_tolerance,
            make_prompt=cls.make_prompt,
            make_reference=cls.make_reference,
            messages=cls.messages,
            chat_reference=cls.chat_reference,
        )

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, subject: ModelSubject) -> Any:
        """The reference model, by default transformers'."""
        return subject.reference

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, subject: ModelSubject) -> DenseRunner:
        """The plugin's model in float32, without an engine."""
        return subject.runner

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls, subject: ModelSubject) -> list[tuple[list[int], list[MediaSpan]]]:
        """One prompt per case."""
        return list(subject.prompts.values())


class ModelVariantConformance(ModelConformance):
    """Tests another config of a model that passes ModelConformance, or another model of the same
    layers: it loads, every key of its checkpoint is read, and its logits and greedy tokens are
    those of the reference, with whole prompts and in chunks."""

    checks = (
        models.loads_the_checkpoint,
        equalities.logits_equal_the_reference,
        equalities.paged_equals_the_reference,
    )


def build(
    spec: ModelSpec, folder: Path, config: Any, dtype: torch.dtype, load_format: Any = "safetensors"
) -> Any:
    """Builds the spec's model with the weights of `folder` on the CPU."""
    checkpoint = Checkpoint(folder=folder, config=config)
    return build_model(factory_of(spec), checkpoint, dtype, torch.device("cpu"), load_format)
