"""Chat parts with a bug each, which the kit finds."""

import itertools
import time
from pathlib import Path

from mmdeploy_llm.hooks import ChatPartSpec

COUNT = itertools.count()
LAST = {}


def spec(function, **fields):
    """Returns a spec of a part {"type": "place", "lat": ..., "lon": ...} written by a function."""
    given = {"keys": {"lat": float, "lon": float}, "types": ("place",), **fields}
    return ChatPartSpec(name="place", factory=f"{__name__}:{function}", **given)


def good(part, about):
    if not (-90 <= part["lat"] <= 90 and -180 <= part["lon"] <= 180):
        raise ValueError("lat must be from -90 to 90 and lon from -180 to 180")
    return [f"At {part['lat']:.4f}, {part['lon']:.4f}."]


def unchecked(part, about):
    return [f"At {part['lat']:.4f}, {part['lon']:.4f}."]


def crashes(part, about):
    return [f"At {int(part['lat'])}, {'NESW'[int(part['lon']) // 90]}: {part['lon']}."]


def without_lon(part, about):
    good(part, about)
    return [f"At {part['lat']:.4f}."]


def changes_its_part(part, about):
    made = good(part, about)
    part["tags"].append("seen")
    return made


def counts(part, about):
    return [*good(part, about), f"Place {next(COUNT)}."]


def shared(part, about):
    """Keeps its part in the module while it writes."""
    good(part, about)
    LAST["part"] = part
    time.sleep(0.002)  # as long as a document may take
    return good(LAST["part"], about)


def endless(part, about):
    return [*good(part, about), dict(part)]


def asks_the_model(part, about):
    return good(part, about) if "image" in about.takes else ["A place."]


def opens_itself(part, about):
    return [Path(part["path"]).read_text()]


def fetched(part, about):
    return [about.fetch(part["path"]).decode()]


def tells_an_address(part, about):
    good(part, about)
    return [f"{object()} {part['lat']} {part['lon']}"]


def refuses_with_an_address(part, about):
    if not (-90 <= part["lat"] <= 90 and -180 <= part["lon"] <= 180):
        raise ValueError(f"it is wrong: {object()}")
    return good(part, about)


def unknown_type(part, about):
    return [*good(part, about), {"type": "map", "map": "x"}]


def says_nothing(part, about):
    try:
        return good(part, about)
    except ValueError:
        raise ValueError from None
