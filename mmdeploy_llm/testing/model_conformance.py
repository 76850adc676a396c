"""What every model must satisfy, as a pytest class to subclass.

class TestMyModel(ModelConformance):
    spec = provide_models()[0]
    cases = {"text": (), "one image": ((1, 4, 6),)}

    def write(self, folder):
        write_tiny("my_family", folder)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mmdeploy_llm.hooks import Checkpoint, ModelSpec
from mmdeploy_llm.request import MediaSpan
from mmdeploy_llm.weights import build_model

from .dense import DenseRunner
from .reference import Reference, random_media

Grid = tuple[int, int, int]
NUM_TOKENS = 20  # greedy tokens that must agree
CHUNK_SIZES = (3, 11)  # smaller than most images


class ModelConformance:
    """spec: the family. cases: name -> the grids of a prompt's media (one frame is an image, more a
    video). write: writes a tiny float32 checkpoint with random weights into the folder.

    tolerance: largest difference of float32 logits.
    """

    spec: ClassVar[ModelSpec]
    cases: ClassVar[Mapping[str, Sequence[Grid]]]
    tolerance: ClassVar[float] = 1e-4

    @staticmethod
    def write(folder: Path) -> None:
        """To be overridden."""
        raise NotImplementedError("a subclass of ModelConformance says how to write a checkpoint")

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint, written once."""
        folder = tmp_path_factory.mktemp(cls.spec.name)
        cls.write(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, folder: Path) -> Reference:
        """transformers' model."""
        return Reference(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, folder: Path, reference: Reference) -> DenseRunner:
        """Our model, float32."""
        return DenseRunner(build(cls.spec, folder, reference.config, torch.float32))

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls, reference: Reference) -> list[tuple[list[int], list[MediaSpan]]]:
        """One prompt per case."""
        return [
            make_prompt(reference.config, grids, seed=seed)
            for seed, grids in enumerate(cls.cases.values())
        ]

    def test_logits_equal_the_reference(
        self, runner: DenseRunner, reference: Reference, prompts: Any
    ) -> None:
        """All tokens of the prompt, in one piece."""
        for name, (ids, media) in zip(self.cases, prompts, strict=True):
            expected = reference.logits(ids, media)
            found = runner.run(runner.add(ids, media))
            assert max_difference(found, expected) < self.tolerance, name

    def test_greedy_tokens_equal_the_reference(
        self, runner: DenseRunner, reference: Reference, prompts: Any
    ) -> None:
        """Prompt and decoding."""
        for name, (ids, media) in zip(self.cases, prompts, strict=True):
            expected = reference.generate(ids, NUM_TOKENS, media)
            assert runner.generate(runner.add(ids, media), NUM_TOKENS) == expected, name

    @pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
    def test_chunks_equal_the_whole(
        self, runner: DenseRunner, prompts: Any, chunk_size: int
    ) -> None:
        """The prompt cut anywhere, inside media too."""
        for name, (ids, media) in zip(self.cases, prompts, strict=True):
            whole = runner.run(runner.add(ids, media))
            chunked = runner.run(runner.add(ids, media), chunk_size)
            assert max_difference(chunked, whole) < self.tolerance, name

    def test_a_packed_batch_equals_single_sequences(
        self, runner: DenseRunner, prompts: Any
    ) -> None:
        """One sequence decodes while the others are prefilled."""
        decoding = runner.add(*prompts[0])
        single = runner.add(*prompts[0])
        for sequence in (decoding, single):
            runner.generate(sequence, 2)
        expected = [runner.run(single)]
        expected += [runner.run(runner.add(*prompt)) for prompt in prompts]
        packed = [(decoding, 1), *((runner.add(*prompt), len(prompt[0])) for prompt in prompts)]
        assert max_difference(runner.step(packed), torch.cat(expected)) < self.tolerance

    def test_bf16_stays_near_float32(
        self, folder: Path, reference: Reference, runner: DenseRunner, prompts: Any
    ) -> None:
        """Same weights, eight bits of precision."""
        half = DenseRunner(build(self.spec, folder, reference.config, torch.bfloat16))
        for name, (ids, media) in zip(self.cases, prompts, strict=True):
            expected = runner.run(runner.add(ids, media))
            found = half.run(half.add(ids, media))
            assert found.dtype is torch.bfloat16
            error = (found.float() - expected).std() / expected.std()
            assert error < 0.15, name

    def test_dummy_weights_give_finite_logits(self, folder: Path, reference: Reference) -> None:
        """load_format="dummy" reads nothing and computes something."""
        model = build(self.spec, folder, reference.config, torch.float32, "dummy")
        runner = DenseRunner(model)
        ids, media = make_prompt(reference.config, ())
        assert runner.run(runner.add(ids, media)).isfinite().all()


def build(
    spec: ModelSpec, folder: Path, config: Any, dtype: torch.dtype, load_format: Any = "safetensors"
) -> Any:
    """The spec's model with the weights of `folder`, on the CPU."""
    module, _, name = spec.factory.partition(":")
    factory = getattr(importlib.import_module(module), name)
    checkpoint = Checkpoint(folder=folder, config=config)
    return build_model(factory, checkpoint, dtype, torch.device("cpu"), load_format)


def max_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; the shapes must be equal."""
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).abs().max())


def make_prompt(
    config: Any, grids: Sequence[Grid], *, seed: int = 0
) -> tuple[list[int], list[MediaSpan]]:
    """Random text with the media between, each within its family's start and end markers."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = config.get_text_config().vocab_size

    def text(num_tokens: int) -> list[int]:
        # The lower tenth of the vocabulary is left to special tokens.
        ids = torch.randint(vocab_size // 10, vocab_size, (num_tokens,), generator=generator)
        return [int(i) for i in ids]

    ids, media = text(9), []
    for index, grid in enumerate(grids):
        kind = "image" if grid[0] == 1 else "video"
        item = random_media(config, grid, kind=kind, seed=100 * seed + index)
        start, end = (_marker(config, kind, part) for part in ("start", "end"))
        media.append(MediaSpan(offset=len(ids) + 1, item=item))
        placeholder = getattr(config, f"{kind}_token_id")
        ids += [start, *[placeholder] * item.num_tokens, end, *text(4)]
    # Long enough that the last position is the largest one, behind a video's last frame too: only
    # then do transformers' two ways to go on (last + 1, largest + 1) agree.
    return ids + text(12), media


def _marker(config: Any, kind: str, part: str) -> int:
    """Families mark images and videos apart (ERNIE) or alike (Qwen)."""
    apart = getattr(config, f"{kind}_{part}_token_id", None)
    return int(config.__dict__[f"vision_{part}_token_id"] if apart is None else apart)
