"""Plans a run: which files there are, where their transcripts go, and which are there already, made
of the same sound by the same model with the same options."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mmdeploy_llm.batch.engine import describe_engine
from mmdeploy_llm.data.files.chosen_kinds import ChosenKinds
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.walk import Ids
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.errors import ConfigError, PluginError
from mmdeploy_llm.hooks import MediaLimits, SpeechRules
from mmdeploy_llm.hooks.factories import imported_for
from mmdeploy_llm.media.loading.reader import media_limits
from mmdeploy_llm.system.guarding.claims import claimed
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.folder import PROMPT_FILES, look_up

from .run import Transcriber, Transcript, Wish
from .sources import Sources
from .writing import FORMATS, write

if TYPE_CHECKING:
    from mmdeploy_llm.engine.startup.model_files import ModelFiles

KINDS = ("audio", "video")  # of a video its sound track


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A file and where its transcripts go: paths by format. stem: the name that they share, without
    their endings. made_by: what decides their words. overwrite: whether they may be there
    already."""

    path: Path
    stem: Path
    targets: dict[str, Path]
    made_by: Configuration
    overwrite: bool = False

    def left_to_do(self) -> Self:
        """Returns the task without the transcripts that are there. Raises ConfigError for one that
        was made of something else, or of which nothing says what it was made of."""
        there = {name: path for name, path in self.targets.items() if path.exists()}
        known = Sources(self.stem)
        for name, path in there.items():
            if why := known.difference(name, self.path, self.made_by):
                raise ConfigError(
                    f"{str(path)!r} is not its transcript, so it stays: {why}; --output writes "
                    "elsewhere, --overwrite replaces it"
                )
        left = {name: path for name, path in self.targets.items() if name not in there}
        return replace(self, targets=left)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Holds the transcripts for this run alone. Raises ConfigError where another run writes
        them, or has written them since the run began."""
        with claimed(self.stem):
            there = [path for path in self.targets.values() if path.exists()]
            if there and not self.overwrite:
                raise ConfigError(
                    f"another run wrote {str(there[0])!r} meanwhile; it stays (--overwrite: again)"
                )
            yield

    def written(self, transcript: Transcript) -> Transcript:
        """Writes the transcripts of a file that has them; returns it, with an error that stopped
        that."""
        if transcript.error is not None:
            return transcript
        try:
            with self.claimed():
                for name, target in self.targets.items():
                    write(target, FORMATS[name](transcript.lines))
                if transcript.source is not None:
                    Sources(self.stem).write(
                        self.targets, transcript.source, self.made_by, transcript.skipped
                    )
        except (ConfigError, OSError) as error:
            return replace(transcript, error=str(error))
        return transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The files to be transcribed, by path. num_done: those that have all transcripts already.
    refused: those whose name has transcripts of something else. told: lines about files that are
    not transcribed."""

    tasks: dict[Path, Task]
    num_done: int
    refused: tuple[Transcript, ...] = ()
    told: tuple[str, ...] = ()

    def run(self, transcriber: Transcriber) -> Iterator[Transcript]:
        """Yields each file once its transcripts are written; one of which there are none has an
        error, also where another run writes them. A claim is an open file: none is held while a
        file is in work, as all files may be at once."""
        refused = list[Transcript]()

        def begun() -> Iterator[Path]:
            for path, task in self.tasks.items():
                try:
                    with task.claimed():
                        pass
                except (ConfigError, OSError) as error:
                    refused.append(Transcript(path=path, error=str(error)))
                else:
                    yield path

        for found in transcriber.run(begun()):
            yield self.tasks[found.path].written(found)
        yield from refused


def open_rule(config: EngineConfig) -> tuple[SpeechRules, MediaLimits]:
    """Returns how the model transcribes, and the limits on sounds; reads no weights. Raises
    ConfigError for a model that does not transcribe."""
    look_up(config, PROMPT_FILES)
    from mmdeploy_llm.engine.startup.model_files import read_model_files  # which imports torch

    files = read_model_files(config, PROMPT_FILES)
    return _rule_of(files), media_limits(config)


def _rule_of(files: ModelFiles) -> SpeechRules:
    name, plugins = files.spec.speech, files.plugins
    if name is None:
        known = sorted(spec.name for spec in plugins.models if spec.speech)
        raise ConfigError(
            f"no plugin says how {files.spec.name} transcribes (ModelSpec.speech); models of "
            f"{', '.join(known) or 'no family'} do: give one by --model"
        )
    about = f"{name}, the speech of model {files.spec.name!r} of {plugins.owner(files.spec)!r},"
    found = imported_for(name, about)
    if not callable(found):
        raise PluginError(f"{about} must be a class or a function, got {type(found).__name__}")
    rule: SpeechRules = found(files.checkpoint)
    return rule


def made_by(config: EngineConfig, wish: Wish) -> Configuration:
    """Returns what decides the words of transcripts besides the sounds. Raises CheckpointError
    where there is no such model."""
    engine, own = describe_engine(config), asdict(wish)
    if not wish.vad:  # the default, of which transcripts before it say nothing
        del own["vad"]
    return replace(engine, values={**engine.values, **own})


def plan(
    paths: Iterable[str],
    formats: Sequence[str],
    folder: Path | None,
    made_by: Configuration,
    *,
    is_recursive: bool = True,
    overwrite: bool = False,
) -> Plan:
    """Finds files of sound, and videos, and names their transcripts: a.srt for a.mp3, beside it or
    beneath `folder`, where of several inputs their ids tell them apart. Two files of one name keep
    their endings: a.mp3.srt and a.wav.srt. A file is done where the transcripts that are there were
    made of it, by the same model and options, see sources.py; it is refused where one was not.
    Raises ConfigError where nothing is found."""
    takes = "`transcribe` takes sounds and videos"
    wanted = ChosenKinds(chosen=KINDS, leaves_out=(f"it has no sound; {takes}", takes))
    found = find_media(paths, is_recursive=is_recursive, wanted=wanted)
    files, ids = found.files, Ids(found.root)
    bases = [Path(one.path) if folder is None else folder / ids.of(one.place) for one in files]
    counts = Counter(name for base in bases for name in {_name(base), _name(base.with_suffix(""))})
    tasks, refused, num_done = dict[Path, Task](), list[Transcript](), 0
    for file, base in zip(files, bases, strict=True):
        is_only = counts[_name(base.with_suffix(""))] == 1
        stem = base.with_suffix("") if is_only else base
        targets = {name: stem.with_name(f"{stem.name}.{name}") for name in formats}
        task = Task(
            path=Path(file.path), stem=stem, targets=targets, made_by=made_by, overwrite=overwrite
        )
        try:
            task = task if overwrite else task.left_to_do()
        except ConfigError as error:
            refused.append(Transcript(path=task.path, error=str(error)))
            continue
        num_done += not task.targets
        if task.targets:
            tasks[task.path] = task
    _make_folders({path.parent for task in tasks.values() for path in task.targets.values()})
    have = "file has its" if num_done == 1 else "files have their"
    done = f"{num_done} {have} transcripts (--overwrite: again)" if num_done else ""
    told = tuple(filter(None, (found.skipped.text, *found.skipped.notes, done)))
    return Plan(tasks=tasks, num_done=num_done, refused=tuple(refused), told=told)


def _make_folders(folders: Iterable[Path]) -> None:
    """Makes the folders of transcripts. Raises ConfigError for one that cannot be written to,
    before hours are computed for it."""
    for folder in sorted(folders):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be made for transcripts: {error.strerror}"
            ) from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{folder} cannot be written to; give another folder by --output")


def _name(path: Path) -> str:
    """Returns what two paths share that some systems hold for one."""
    return os.fspath(path).casefold()
