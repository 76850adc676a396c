"""Opens models for commands. The engine is imported only then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.budgets.photo import telling_the_cost
from mmdeploy_llm.command_options.missing import check_model

if TYPE_CHECKING:
    from mmdeploy_llm.aio.async_llm import AsyncLLM
    from mmdeploy_llm.answers.rounds import Answerer
    from mmdeploy_llm.llm import LLM
    from mmdeploy_llm.media_loading.loader import MediaLoader
    from mmdeploy_llm.report.previews import FilePreviews


@contextmanager
def open_llm(model: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """Opens the model and closes it at the end of the block."""
    check_model(model, options)  # before the client of the engine is imported
    from mmdeploy_llm.llm import LLM

    with LLM(model=model, **{"quiet": True, **options}) as llm:
        yield llm


def open_answerer(
    model: str, options: Mapping[str, Any], cluster: str | None
) -> AbstractContextManager[Answerer]:
    """Opens the model in this process, or on the Ray cluster with this address."""
    if cluster is None:
        return telling_the_cost(open_llm(model, options), options)
    from mmdeploy_llm.ray import ClusterLLM

    return ClusterLLM(model, address=cluster, **options)


def open_async_llm(model: str, options: Mapping[str, Any]) -> AsyncLLM:
    """Opens the model for single requests."""
    from mmdeploy_llm.aio.async_llm import AsyncLLM

    return AsyncLLM(model, **{"quiet": True, **options})


def open_media(model: str, options: Mapping[str, Any]) -> MediaLoader:
    """Returns the model's media loader, without loading weights."""
    from mmdeploy_llm.config import EngineConfig
    from mmdeploy_llm.startup import media

    return media.open_media(EngineConfig.from_options(model, options))


def open_reader(model: str, options: Mapping[str, Any]) -> MediaLoader:
    """Returns a loader that reads media within the limits and needs no files of the model."""
    from mmdeploy_llm.config import EngineConfig
    from mmdeploy_llm.media_loading import reader

    return reader.open_reader(EngineConfig.from_options(model, options))


def previews_of(model: str, options: Mapping[str, Any]) -> FilePreviews:
    """Returns what makes the pictures of a report."""
    from mmdeploy_llm.report.previews import FilePreviews

    return FilePreviews(lambda: open_reader(model, options), lambda: open_media(model, options))
