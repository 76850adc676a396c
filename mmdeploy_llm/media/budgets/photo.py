"""Says at the start of a batch what a photo costs: the first lever of a captioner."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from mmdeploy_llm.errors import RequestError

PHOTO = 4032, 3024  # pixels of a phone's photo, 12 MP
Model = TypeVar("Model")


@contextmanager
def telling_the_cost(
    opened: AbstractContextManager[Model], options: Mapping[str, Any]
) -> Iterator[Model]:
    """Opens a model and writes its tokens of a photo to stderr. options: of LLM()."""
    with opened as model:
        said = cost_of_a_photo(model, options.get("image_tokens", "full"))
        if said is not None and sys.stderr is not None:
            sys.stderr.write(f"{said}\n")
        yield model


def cost_of_a_photo(llm: Any, budget: object) -> str | None:
    """Returns a line with the tokens of a photo, and its size as the model sees it where the family
    says so; None for a model that takes none. budget: the option image_tokens."""
    import numpy as np  # the program imports this file before it knows what it is to do

    width, height = PHOTO
    photo = np.broadcast_to(np.uint8(0), (height, width, 3))  # one byte of memory
    message = {"role": "user", "content": [{"type": "image", "image": photo}]}
    try:
        found = llm.count_tokens({"messages": [message]})
    except RequestError:
        return None
    seen = (
        "12 MP photos" if found.shown is None else "12 MP photos become {}x{}".format(*found.shown)
    )
    return f"{seen} -> {found.num_input_image_tokens:,} tokens (--image-tokens {budget})"
