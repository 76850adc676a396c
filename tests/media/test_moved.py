"""What plugins of earlier versions import works where it was, and says where it is now."""

import importlib

import pytest

from mmdeploy_llm import media


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("image.decode", "ImageDecoder"),
        ("isolation", "Workers"),
        ("video.opening", "open_video"),
        ("video.timeline", "Timeline"),
    ],
)
def test_old_places(old, name):
    module = importlib.import_module(f"mmdeploy_llm_processors.{old}")
    with pytest.warns(DeprecationWarning, match=f"import {name} from mmdeploy_llm.media"):
        found = getattr(module, name)
    assert found is getattr(media, name)


def test_names_without_a_new_place():
    module = importlib.import_module("mmdeploy_llm_processors.video.timeline")
    with pytest.warns(DeprecationWarning, match="check_size will be removed"):
        assert callable(module.check_size)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_all_public_names():
    assert dir(media) == sorted(media.__all__)
    assert all(getattr(media, name) is not None for name in media.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = media.nothing
