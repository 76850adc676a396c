"""Writes the package of a new plugin: fills names into templates.

templates/common      files of every package
templates/<kind>      files of one kind; a file replaces the common one of the same name

A template's path may contain $module. Templates end in .tmpl so that tools do not treat them as
code.
"""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from types import MappingProxyType

from mmdeploy_llm import __version__
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks.names import did_you_mean
from mmdeploy_llm.hooks.versions import API_VERSION

# Kind -> what it is; each has a folder of templates.
SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        "model": "a text model (Seed-OSS of transformers) on mmdeploy_llm.layers",
        "vision-model": "a model that reads images (LLaVA of transformers) on mmdeploy_llm.layers",
        "reasoning-parser": "a reasoning parser",
        "tool-parser": "a parser of tool calls",
        "logits-processor": "a logits processor",
        "media-kind": "a kind of media whose items are several images each (albums)",
        "media-processor": "a processor of charts, a kind of media with tensors of its own",
        "fetcher": "a source of media for addresses of its own",
        "observer": "an observer that counts what engines do",
        "corpus-format": "a format of corpora (WARC, archives of web crawls)",
        "output-sink": "a format of outputs (SQLite)",
        "attention-backend": "an attention backend in plain torch",
        "weight-format": "a format of quantised weights, 8 bits with a scale for each row",
        "chat-part": "a type of parts of chat messages (places on a map)",
    }
)
SHORT: Mapping[str, str] = MappingProxyType(
    {"parser": "reasoning-parser", "logits": "logits-processor", "processor": "media-processor"}
)
NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention-backend": ("torch",),
        "logits-processor": ("torch",),
        "model": ("torch",),
        "vision-model": ("numpy", "pillow", "torch"),
        "media-processor": ("numpy", "pillow", "torch"),
        "weight-format": ("torch",),
    }
)
KINDS = tuple(SUMMARIES)
FROM_CHECKPOINT = "from-checkpoint"  # the templates of a text model that is known
MEDIA = ("image",)  # what a model may read
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([._-]+[A-Za-z0-9]+)*")  # PEP 503, first a letter
TAKEN = frozenset({"mmdeploy"})  # mmdeploy-llm is this package itself
SUFFIX = ".tmpl"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPackage:
    """The package that was written. files: paths below `folder`, sorted. steps: next commands.
    findings: what the checkpoint needs that it was begun from."""

    folder: Path
    summary: str
    files: tuple[str, ...]
    findings: tuple[str, ...]
    steps: tuple[str, ...]


def write_package(
    name: str,
    kind: str | None,
    directory: Path,
    *,
    media: str | None = None,
    checkpoint: Path | None = None,
) -> NewPackage:
    """Writes the folder NAME-llm below `directory`, which is created if it does not exist.

    name: name of the plugin. kind: one of KINDS, or short for one. media: one of MEDIA makes a
    model one that reads it beside text. checkpoint: a folder whose model the package begins with;
    the kind may then be None. Raises ConfigError for a name that is not valid for a
    package and a module, an unknown kind, media of another kind, and a folder that already exists.
    """
    template = template_of(kind, media, is_known=checkpoint is not None)
    names = package_names(name)
    folder = directory / names["package"]
    if os.path.lexists(folder):
        raise ConfigError(
            f"{str(folder)!r} exists; nothing is overwritten: use another name or --directory"
        )
    findings: tuple[str, ...] = ()
    if checkpoint is None:
        texts = render(template, names)
    else:
        texts, template, findings = _from_checkpoint(checkpoint, template, names)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("x", encoding="utf-8") as file:  # follows no planted link
            file.write(text)
    return NewPackage(
        folder=folder,
        summary=SUMMARIES[template] if checkpoint is None else f"a {template} for {checkpoint}",
        files=tuple(sorted(texts)),
        findings=findings,
        steps=(
            f"cd {folder}",
            'pip install -e ".[test]"',
            "pytest",
            f"mmdeploy-llm plugins check {names['name']}",
        ),
    )


def _from_checkpoint(
    checkpoint: Path, template: str, names: Mapping[str, str]
) -> tuple[Mapping[str, str], str, tuple[str, ...]]:
    """Returns the files that begin with a checkpoint's model, their template, and the findings."""
    from .from_checkpoint import needs, values  # they import transformers
    from .survey import survey

    found = survey(checkpoint)
    template = template or found.kind
    is_begun = template == "model" and found.decoder is not None
    texts = dict(render(FROM_CHECKPOINT if is_begun else template, {**names, **values(found)}))
    texts["README.md"] += needs(found)
    return texts, template, found.lines


def template_of(kind: str | None, media: str | None = None, *, is_known: bool = False) -> str:
    """Returns the folder of the kind's templates. is_known: a checkpoint says the kind where none
    is given, "" is then returned. Raises ConfigError for an unknown kind, for unknown media, and
    for media or a checkpoint of a kind that is no model."""
    if kind is None and is_known:
        return ""
    if kind is None:
        raise ConfigError(f"give --kind, or --from and a checkpoint; kinds: {', '.join(KINDS)}")
    kind = SHORT.get(kind, kind)
    if kind not in KINDS:
        hint = did_you_mean(kind, (*KINDS, *SHORT))
        raise ConfigError(f"there is no kind {kind!r}{hint}; kinds: {', '.join(KINDS)}")
    if is_known and kind not in ("model", "vision-model"):
        raise ConfigError(f"--from is for models, not for a {kind}")
    if media is None:
        return kind
    if kind not in ("model", "vision-model"):
        raise ConfigError(f"only a model has media, not a {kind}; use --kind vision-model")
    if media not in MEDIA:
        hint = did_you_mean(media, MEDIA)
        raise ConfigError(f"there is no template for {media!r}{hint}; media: {', '.join(MEDIA)}")
    return "vision-model"


def package_names(name: str) -> Mapping[str, str]:
    """Returns the values for the templates: names of the plugin, its package, module and classes.

    Raises ConfigError for an invalid name.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a package; use letters, digits and single '-', "
            "beginning with a letter, such as acme or acme-vision"
        )
    plain = re.sub(r"[._-]+", "-", name).lower().removesuffix("-llm")
    module = f"{plain.replace('-', '_')}_llm"
    if plain in TAKEN or keyword.iskeyword(module):
        raise ConfigError(f"the name {name!r} is reserved; choose another one")
    return {
        "name": plain,
        "package": f"{plain}-llm",
        "module": module,
        "title": "".join(word.capitalize() for word in plain.split("-")),
        "variable": f"{module.upper()}_FOLDER",  # of the environment
        "requirement": _requirement(__version__),
        "api": str(API_VERSION),
    }


def _requirement(version: str) -> str:
    """Returns the requirement: this minor version up to, not including, the next major one."""
    major, minor = version.split(".")[:2]
    return f"mmdeploy-llm>={major}.{minor},<{int(major) + 1}"


def render(template: str, names: Mapping[str, str]) -> Mapping[str, str]:
    """Returns path -> text of every file of a package. template: see template_of."""
    root = resources.files(__package__) / "templates"
    kind = "model" if template == FROM_CHECKPOINT else template
    needs = (names["requirement"], *NEEDS.get(kind, ()))
    summary = f"a model, {names['architecture']}" if kind != template else SUMMARIES[kind]
    names = {
        **names,
        "summary": summary[0].upper() + summary[1:],
        "dependencies": "\n".join(f'    "{need}",' for need in needs),
    }
    found = {**_texts(root / "common"), **_texts(root / template)}
    return {
        Template(path).substitute(names): Template(text).substitute(names)
        for path, text in found.items()
    }


def _texts(folder: Traversable, prefix: str = "") -> dict[str, str]:
    """Returns path -> text of the templates below a folder."""
    found: dict[str, str] = {}
    for item in folder.iterdir():
        if item.is_dir():
            found |= _texts(item, f"{prefix}{item.name}/")
        elif item.name.endswith(SUFFIX):
            found[prefix + item.name.removesuffix(SUFFIX)] = item.read_text(encoding="utf-8")
    return found
