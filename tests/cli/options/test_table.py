"""One table of options: a name means the same in every command, and is declared once."""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
import typer
from typer.testing import CliRunner

from mmdeploy_llm.batch.arguments import BatchOptions, EmbedArguments
from mmdeploy_llm.batch.documents.reading.options import ReadArguments
from mmdeploy_llm.batch.options import option_settings
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.cli.options.groups import Given, Group, Rows, Shown, with_groups
from mmdeploy_llm.cli.options.shared import DeskOptions
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.engine_flags import EngineFlags
from mmdeploy_llm.values.options.flags import Flag

COMMANDS = typer.main.get_group(app).commands
# Each command has a file of its own; `search` takes the model that its file names.
OWN = {"output", "max_tokens", "model"}


def options_of(command):
    params = [each for each in COMMANDS[command].params if each.param_type_name == "option"]
    return {each.name: each for each in params if each.name != "help"}


def test_caption_and_batch_have_the_same_options_but_those_of_columns():
    caption, batch = options_of("caption"), options_of("batch")
    assert set(caption) <= set(batch)
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


def run_with(words, *parts):
    """Returns what a command with these parameters has after the words."""
    found = {}

    def command(ctx: typer.Context, **given) -> None:
        found.update(given)

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, kind, annotation=note) for name, note in parts]
    ctx = inspect.Parameter("ctx", kind, annotation=typer.Context)
    command.__signature__ = inspect.Signature([ctx, *own])
    program = typer.Typer()
    program.command()(with_groups(command))
    done = CliRunner().invoke(program, words)
    assert done.exit_code == 0, done.output
    return found


def test_every_setting_of_the_table_is_one_of_a_batch():
    desk = run_with([], ("desk", DeskOptions))["desk"]
    assert desk.to_batch() == {}  # the library has the defaults
    BatchSettings(**{**option_settings(desk.to_batch()), **desk.to_settings()})
    assert desk.to_sampling() == {"max_tokens": 1024, "temperature": 0.0}
    assert EngineConfig(model="m", **{k: v for k, v in desk.to_engine().items() if v is not None})


@pytest.mark.parametrize(
    ("command", "source"),
    [("batch", BatchOptions), ("embed", EmbedArguments), ("read", ReadArguments)],
)
def test_calls_have_the_names_of_the_program(command, source):
    assert set(source.__annotations__) <= set(options_of(command))
    assert option_settings({"recursive": False})["is_recursive"] is False


@pytest.mark.parametrize("source", [BatchOptions, ReadArguments, EngineFlags])
def test_what_is_given_with_its_default_is_given(source):
    """It is not taken for what is not given: in conflicts, and where presets would replace it."""
    rows = dict(Rows(source).params)
    assert len(rows) > 10
    for name, param in rows.items():
        note = Annotated[Given, Rows(source, name)]
        if param.default is None:
            continue
        long = f"--{param.name.replace('_', '-')}"
        words = [long] if param.default is True else [f"{long}={param.default}"]
        given = run_with([] if param.default is False else words, ("found", note))["found"]
        if param.default is not False:
            assert str(given[name]) == str(param.default)
        if not Rows(source).of_engine:
            assert run_with([], ("found", note))["found"] == {}


class Paints(TypedDict, total=False):
    shade: Annotated[str, Flag("A colour.", default="red")]
    coats: Annotated[int | None, Flag("How many.", min=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Colours(Group):
    title = "Paint"
    chosen: Annotated[Given, Rows(Paints)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Group):
    length: Annotated[int | None, typer.Option(), Shown(3)] = None

    def to_settings(self) -> dict[str, Any]:
        return {"length": self.length}


@dataclass(frozen=True, slots=True, kw_only=True)
class Both(Group):
    colours: Colours
    sizes: Sizes


@pytest.mark.parametrize(
    ("words", "settings", "batch"),
    [
        ((), {"length": None}, {}),
        (("--length", "3", "--shade", "red"), {"length": 3}, {"shade": "red"}),
        (("--length", "7", "--coats", "2"), {"length": 7}, {"coats": 2}),
    ],
)
def test_a_group_of_groups_gives_a_command_all_options(words, settings, batch):
    both = run_with([*words], ("both", Both))["both"]
    assert both.to_settings() == settings
    assert both.to_batch() == batch
    assert both.to_engine() == {}


def test_two_groups_cannot_set_the_same():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Twice(Group):
        one: Sizes
        two: Sizes

    with pytest.raises(AssertionError, match="two groups set"):
        Twice(one=Sizes(), two=Sizes()).to_settings()
