"""Three types of content parts as a plugin of one file: a place, a table, and a notebook, whose
cells become texts and whose plots become images."""

import json

from mmdeploy_llm.hooks import ChatPartSpec, hookimpl

MOST_ROWS = 500


@hookimpl
def provide_chat_parts():
    """Lists the types, with the keys that their parts have."""
    where = {"lat": float, "lon": float}
    rows = {"rows": list}
    notebook = {"keys": {"notebook": str}, "files": ("notebook",), "late": True}
    return [
        _spec("location", keys=where, optional={"name": str}),
        _spec("table", keys=rows, optional={"header": list}),
        _spec("notebook", **notebook),
    ]


def _spec(name, **fields):
    return ChatPartSpec(name=name, types=(name,), factory=f"{__name__}:{name}", **fields)


def location(part, about):
    """{"type": "location", "lat": 47.37, "lon": 8.54, "name": "Zurich"}"""
    lat, lon = part["lat"], part["lon"]
    if not (-90 <= lat <= 90 and -180 <= lon <= 180):  # which NaN is not, either
        raise ValueError("lat must be from -90 to 90 and lon from -180 to 180")
    own = f"{abs(lat):.4f} {'N' if lat >= 0 else 'S'}, {abs(lon):.4f} {'E' if lon >= 0 else 'W'}"
    return [f"Place: {part['name']} ({own}). " if "name" in part else f"Place: {own}. "]


def table(part, about):
    """{"type": "table", "header": ["city", "people"], "rows": [["Zurich", 447000]]}"""
    rows = [*([part["header"]] if "header" in part else []), *part["rows"]]
    if not all(isinstance(row, (list, tuple)) and len(row) == len(rows[0]) for row in rows):
        raise ValueError("rows must be lists of one length")
    if len(rows) > MOST_ROWS:
        raise ValueError(f"a table has at most {MOST_ROWS} rows, got {len(rows)}")
    if not all(value is None or isinstance(value, (str, int, float)) for r in rows for value in r):
        raise ValueError("the cells of a table are texts and numbers")
    return ["\n".join(" | ".join(map(str, row)) for row in rows) + "\n"]


def notebook(part, about):
    """{"type": "notebook", "notebook": "a.ipynb"}: its files are read within the limits."""
    try:
        cells = json.loads(about.fetch(part["notebook"]))["cells"]
        return [made for cell in cells for made in _cell(cell, "image" in about.takes)]
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError("it is no notebook") from error


def _cell(cell, has_images):
    yield "".join(cell["source"]) + "\n"
    for output in cell.get("outputs", ()):
        plot = output.get("data", {}).get("image/png")
        if plot and has_images:
            yield {"type": "image", "image": f"data:image/png;base64,{''.join(plot).strip()}"}
