"""The TypedDicts that tell editors and type checkers which options there are, and of which types,
and the program which of them have an option of their own. They are written from the fields of the
classes that check the options, which import pydantic. After a change of these:

    python tests/test_option_dicts.py
"""

import subprocess
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.flags import Flag
from mmdeploy_llm.values.params import (
    ALIASES,
    EarlyStopParams,
    GuidedDecodingParams,
    NoRepeatNGramParams,
    SamplingParams,
)
from mmdeploy_llm.values.params.frozen import Accepts, FrozenParams

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "mmdeploy_llm/values/params"
DICTS: dict[str, dict[str, type[FrozenParams]]] = {  # by file
    "inner_dicts.py": {
        "EarlyStopOptions": EarlyStopParams,
        "GuidedDecodingOptions": GuidedDecodingParams,
        "NoRepeatNGramOptions": NoRepeatNGramParams,
    },
    # The classes above take those options, and are values of these.
    "option_dicts.py": {"EngineOptions": EngineConfig, "SamplingOptions": SamplingParams},
}
FLAGS_FILE = ROOT / "mmdeploy_llm/values/options/engine_flags.py"
FLAGS_HEAD = """\
\"\"\"The options of an engine that the program has, as the fields of EngineConfig have their Flags.
Written from these by tests/test_option_dicts.py, so that --help need not import pydantic.\"\"\"

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

from .flags import Flag


class EngineFlags(TypedDict, total=False):
    \"\"\"Options of EngineConfig, with the types that their values have on the command line.\"\"\"

"""
HEAD = """\
\"\"\"Names and types of options, for editors and type checkers. Written from the fields of the
classes that check them, by tests/test_option_dicts.py.\"\"\"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    import torch
    from pydantic import BaseModel

    from .inner import EarlyStopParams, GuidedDecodingParams, NoRepeatNGramParams
"""


def spelled(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Returns the types that a caller may give for an annotation, as text."""
    for own in metadata:
        if isinstance(own, Accepts):
            return own.types
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return spelled(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(spelled(own) for own in args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is tuple:
        return f"Sequence[{spelled(args[0])}]"
    if origin is not None and issubclass(origin, Mapping):
        return f"Mapping[{', '.join(map(spelled, args))}]"
    if annotation is type(None):
        return "None"
    if annotation is Path:
        return "str | PathLike[str]"
    if isinstance(annotation, type) and issubclass(annotation, FrozenParams):
        return f"{annotation.__name__} | Mapping[str, Any]"
    return "Any" if annotation is Any else annotation.__name__


def body(name: str, model: type[FrozenParams]) -> str:
    """Returns the text of a TypedDict."""
    hints = typing.get_type_hints(model, include_extras=True)
    rows = {
        field.alias or own: spelled(hints[own])
        for own, field in model.model_fields.items()
        if own != "model"
    }
    rows |= {alias: rows[name] for alias, name in ALIASES.items() if model is SamplingParams}
    rows |= {"enable_early_stop": "bool"} if model is EngineConfig else {}
    lines = [
        f"    {own}: {text if text.endswith('None') else f'{text} | None'}"
        for own, text in sorted(rows.items())
    ]
    head = f'class {name}(TypedDict, total=False):\n    """Options of {model.__name__}."""\n'
    return "\n".join([head, *lines])


def written(dicts: Mapping[str, type[FrozenParams]]) -> str:
    """Returns the text of a file, in ruff's format."""
    bodies = "\n\n".join(body(name, model) for name, model in dicts.items())
    return formatted(HEAD + "\n\n" + bodies + "\n")


def flags_written() -> str:
    """Returns the text of the file of flags, in ruff's format."""
    lines = []
    for name, field in EngineConfig.model_fields.items():
        for flag in (own for own in field.metadata if isinstance(own, Flag)):
            kind = spelled(field.annotation).removesuffix(" | None")
            kind = kind if kind in ("int", "float", "bool") else "str"
            least = next((own.ge for own in field.metadata if hasattr(own, "ge")), None)
            whole = replace(flag, min=least)
            usual = {own.name: getattr(Flag(""), own.name) for own in fields(Flag)}
            given = ", ".join(
                f"{key}={of_flag(value)}"
                for key in usual
                if (value := getattr(whole, key)) != usual[key]
            )
            lines.append(f"    {name}: Annotated[{kind}, Flag({given})]")
    return formatted(FLAGS_HEAD + "\n".join(lines) + "\n")


def of_flag(value: Any) -> str:
    """Returns a value of a flag as Python writes it, a text in lines that are not too long."""
    if not isinstance(value, str):
        return repr(value).replace("pathlib.", "")
    lines = textwrap.wrap(value, 76, drop_whitespace=False, break_on_hyphens=False)
    return "(" + "\n".join(map(repr, lines)) + ")" if len(lines) > 1 else repr(value)


def formatted(text: str) -> str:
    """Returns Python code in this repository's format, with its unused imports removed."""
    ruff = [sys.executable, "-m", "ruff"]
    name = ["--stdin-filename", str(ROOT / "mmdeploy_llm" / "made.py")]
    for command in (["check", "--fix", "--quiet", "--select", "F401,I"], ["format"]):
        run = [*ruff, *command, *name, "-"]
        text = subprocess.run(run, input=text, capture_output=True, text=True, check=True).stdout
    return text


def test_the_file_has_the_flags_of_the_fields():
    assert FLAGS_FILE.read_text() == flags_written(), f"run python tests/{Path(__file__).name}"


@pytest.mark.parametrize("name", DICTS)
def test_the_file_has_the_fields_of_the_classes(name):
    is_written = (FOLDER / name).read_text() == written(DICTS[name])
    assert is_written, f"run python tests/{Path(__file__).name}"


def test_an_option_without_a_type_would_be_seen():
    assert spelled(Annotated[tuple[str, ...], Accepts("str | Sequence[str]")]) == (
        "str | Sequence[str]"
    )
    assert spelled(Mapping[str, float] | None) == "Mapping[str, float] | None"
    assert spelled(EarlyStopParams | bool) == "EarlyStopParams | Mapping[str, Any] | bool"


if __name__ == "__main__":
    for name, dicts in DICTS.items():
        (FOLDER / name).write_text(written(dicts))
    FLAGS_FILE.write_text(flags_written())
