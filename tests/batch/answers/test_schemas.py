"""AnswerSchema: what a schema may be given as, what it does to parameters, what it checks."""

import json
import sys
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from mmdeploy_llm.batch.answers import schemas
from mmdeploy_llm.batch.answers.schemas import AnswerSchema, ModelCheck
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.params import GuidedDecodingParams, SamplingParams


class Shape(BaseModel):
    color: Literal["red", "blue"]
    sides: int

    @field_validator("sides")
    @classmethod
    def _is_even(cls, value):
        if value % 2:
            raise ValueError("the number of sides must be even")
        return value


class Scene(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"type": "object"}]})
    shapes: list[Shape]
    properties: dict[str, int] = {}


SCHEMA = Shape.model_json_schema() | {"additionalProperties": False}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_shapes", None)


def test_a_schema_is_a_dict_a_file_or_a_class(folder):
    (folder / "s.json").write_text(json.dumps(SCHEMA))
    (folder / "my_shapes.py").write_text(
        "from pydantic import BaseModel\nclass Own(BaseModel):\n    a: int\nother = 3\n"
    )
    for given in (SCHEMA, "s.json", folder / "s.json", Shape):
        assert AnswerSchema.given(given).values == SCHEMA
    path = list(sys.path)
    assert AnswerSchema.given("my_shapes:Own").values["required"] == ["a"]
    assert sys.path == path
    assert AnswerSchema.given(validate="my_shapes:Own").is_guide is False
    for wrong, words in (
        ("my_shapes:other", "no class of pydantic"),
        ("my_shapes:Missing", "no attribute 'Missing'"),
        ("my_missing:Own", "No module named 'my_missing'"),
        (int, "the class int is none of pydantic's"),
        (7, "got int"),
        ("missing.json", "cannot be read"),
        ("/dev/zero", "no regular file"),
    ):
        with pytest.raises(ConfigError, match=words):
            AnswerSchema.given(wrong)


def test_a_module_that_raises_is_a_wrong_option(folder):
    (folder / "my_shapes.py").write_text("raise RuntimeError('boom')\n")
    with pytest.raises(ConfigError, match=r"cannot be imported: .*boom"):
        AnswerSchema.given("my_shapes:Own")


def test_modules_of_the_working_folder_hide_none(folder):
    (folder / "colorsys.py").write_text("class Own: ...\n")
    with pytest.raises(ConfigError, match="no attribute 'Own'"):
        AnswerSchema.given("colorsys:Own")


def test_objects_of_a_class_have_no_other_fields():
    values = AnswerSchema.given(Scene).values
    assert values["additionalProperties"] is False
    assert values["$defs"]["Shape"]["additionalProperties"] is False
    assert values["properties"]["properties"]["additionalProperties"] == {"type": "integer"}
    assert values["examples"] == [{"type": "object"}]


def test_a_class_is_a_constraint_and_a_response_format():
    own = GuidedDecodingParams(json=Shape)
    assert own.json_schema == SCHEMA
    params = SamplingParams(response_format=Shape)
    assert params.guided_decoding == own
    assert params.response_format["json_schema"]["name"] == "Shape"
    assert params.replace(temperature=0).guided_decoding == own
    for wrong in ({"guided_decoding": {"json": int}}, {"response_format": int}):
        with pytest.raises(ConfigError, match="the class int has no schema"):
            SamplingParams(**wrong)


def test_what_guides_and_what_only_checks():
    guide, check = AnswerSchema.given(Shape), AnswerSchema.given(validate=Shape)
    plain = SamplingParams(max_tokens=5)
    assert check.guided(plain) is plain
    guided = guide.guided(plain)
    assert guided.guided_decoding.json_schema == SCHEMA
    assert guide.guided(guided) == guided
    with pytest.raises(ConfigError, match="give one of them"):
        guide.guided(SamplingParams(guided_decoding={"regex": "a"}))
    with pytest.raises(ConfigError, match="give one of them"):
        AnswerSchema.given(Shape, Shape)
    assert AnswerSchema.given() is None
    assert (list(guide.configuration()), list(check.configuration())) == (["schema"], ["validate"])


def test_a_guide_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(schemas, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[guided\]"):
        AnswerSchema.given(Shape)
    assert AnswerSchema.given(validate=Shape) is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"color": "red", "sides": 4}', None),
        ('{"color": "red", "sides": 3}', "must be even"),
        ('{"color": "green", "sides": 4}', "color: "),
        ('{"color": "red"', "Invalid JSON"),
        ("", "Invalid JSON"),
    ],
)
def test_a_class_checks_with_its_validators(text, words):
    found = ModelCheck(Shape).violation(text)
    assert found is None if words is None else words in found
