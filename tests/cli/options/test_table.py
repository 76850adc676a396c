"""One table of options: a name means the same in every command."""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from mmdeploy_llm.batch.arguments import BatchOptions
from mmdeploy_llm.batch.options import option_settings
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.cli.options.groups import Group, Groups, with_groups
from mmdeploy_llm.cli.options.shared import DeskOptions
from mmdeploy_llm.cli.program import app

COMMANDS = typer.main.get_group(app).commands
# Each command has a file of its own; `search` takes the model that its file names.
OWN = {"output", "max_tokens", "model"}


def options_of(command):
    params = [each for each in COMMANDS[command].params if each.param_type_name == "option"]
    return {each.name: each for each in params if each.name != "help"}


def test_caption_and_batch_have_the_same_options_but_those_of_columns():
    caption, batch = options_of("caption"), options_of("batch")
    assert set(caption) - set(batch) == set()
    media = {"image_column", "video_column", "audio_column", "media_column"}
    columns = {*media, "prompt_column", "id_column", "columns"}
    assert set(batch) - set(caption) == columns


def test_a_name_has_one_default_and_one_spelling_in_all_commands():
    seen = {}
    for command in COMMANDS:
        if not hasattr(COMMANDS[command], "commands"):
            for name, option in options_of(command).items():
                found = (option.default, option.opts, option.secondary_opts)
                first = seen.setdefault(name, (command, found))
                assert name in OWN or first[1] == found, f"--{name} in {first[0]} and {command}"
    assert len(seen) > 40


def test_every_setting_of_the_table_is_one_of_a_batch():
    default = {
        name: param.default
        for name, param in inspect.signature(with_groups(uses_desk)).parameters.items()
    }
    desk = made(DeskOptions, default)
    BatchSettings(**desk.to_settings())
    assert desk.to_sampling() == {"max_tokens": 1024, "temperature": 0.0}


def uses_desk(*, desk: DeskOptions) -> None:
    """Do nothing."""


def made(group, values):
    parts = inspect.signature(group, eval_str=True).parameters
    return group(
        **{
            name: made(part.annotation, values)
            if issubclass(getattr(part.annotation, "__mro__", [object])[0], Group)
            else values[name]
            for name, part in parts.items()
        }
    )


def test_options_of_run_batch_have_the_names_of_the_program():
    table = set(options_of("batch"))
    assert set(BatchOptions.__annotations__) <= table
    assert option_settings({"recursive": False})["is_recursive"] is False


@dataclass(frozen=True, slots=True, kw_only=True)
class Colours(Group):
    shade: Annotated[str, typer.Option(help="A colour.")] = "red"

    def to_settings(self) -> dict[str, Any]:
        return {"shade": self.shade}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Group):
    length: int = 3

    def to_settings(self) -> dict[str, Any]:
        return {"length": self.length}


@dataclass(frozen=True, slots=True, kw_only=True)
class Both(Groups):
    colours: Colours
    sizes: Sizes


def test_a_group_of_groups_gives_a_command_all_options():
    found = []

    @with_groups
    def paint(name: str, *, both: Both) -> None:
        """Paint."""
        found.append((name, both.to_settings(), both.to_engine()))

    app = typer.Typer()
    app.command()(paint)
    done = CliRunner().invoke(app, ["wall", "--length", "7"])
    assert done.exit_code == 0, done.output
    assert found == [("wall", {"shade": "red", "length": 7}, {})]


def test_two_groups_cannot_set_the_same():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Twice(Groups):
        one: Colours
        two: Colours

    with pytest.raises(AssertionError, match="two groups set"):
        Twice(one=Colours(), two=Colours()).to_settings()
