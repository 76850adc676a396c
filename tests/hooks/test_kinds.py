"""The table of kinds: what specs declare of their files, columns and parts of messages."""

import pytest

from mmdeploy_llm.errors import PluginConflictError, PluginContractError, PluginLoadError
from mmdeploy_llm.hooks import (
    MediaProcessorSpec,
    MediaSplitter,
    PluginManager,
    SplitPart,
    hookimpl,
)
from mmdeploy_llm.hooks.kinds import table_of
from mmdeploy_llm.hooks.records import PluginOrigin, Provided

SOUND = {
    "name": "s",
    "kind": "audio",
    "factory": "a:b",
    "suffixes": (".wav", ".flac"),
    "columns": ("audio", "Speech"),
    "first_bytes": ((8, b"WAVE"), b"fLaC"),
    "part_types": ("input_audio",),
}
PDF = {"name": "p", "kind": "pdf", "factory": "a:b", "suffixes": (".pdf",), "yields": "image"}


def table(*specs, is_builtin=False):
    return table_of(
        Provided(
            spec=MediaProcessorSpec(**spec),
            origin=PluginOrigin(name=f"p{i}", module="m", is_builtin=is_builtin),
        )
        for i, spec in enumerate(specs)
    )


def manager_of(*specs, name="acme"):
    class Plugin:
        @hookimpl
        def provide_media_processors(self):
            return [MediaProcessorSpec(**spec) for spec in specs]

    manager = PluginManager()
    manager.register(Plugin(), name)
    return manager


def test_images_videos_and_sounds_are_known_without_plugins():
    kinds = PluginManager().kinds
    assert kinds.kinds == ("image", "video", "audio")
    assert [kinds.of_name(name) for name in ("a/B.JPG", "x.mp4", "x.wav", "x")] == [
        "image",
        "video",
        "audio",
        None,
    ]
    assert [kinds.of_column(name) for name in ("Images", "webm", "text")] == [
        "image",
        "video",
        None,
    ]
    heads = (
        b"\x89PNG\r\n\x1a\n",
        b"RIFF0000WEBP",
        b"0000ftypavif",
        b"0000ftypisom",
        b"RIFF0000WAVE",
    )
    assert [kinds.of_bytes(head) for head in heads] == ["image", "image", "image", "video", "audio"]
    sounds = b"ID3\4", b"\xff\xfb\x90", b"OggS" + bytes(24) + b"OpusHead", b"0000ftypM4A "
    assert {kinds.of_bytes(head) for head in sounds} == {"audio"}
    assert [kinds.of_part(name) for name in ("image_url", "video", "input_audio", "pdf")] == [
        "image",
        "video",
        "audio",
        None,
    ]


def test_a_spec_adds_its_kind():
    kinds = manager_of(SOUND, PDF).kinds
    assert kinds.kinds == ("image", "video", "audio", "pdf")
    assert kinds.of_name("talk.WAV") == "audio"
    assert kinds.of_bytes(b"RIFF0000WAVE") == kinds.of_bytes(b"fLaC") == "audio"
    assert kinds.of_column("speech") == kinds.of_column("flac") == "audio"
    assert [kinds.of_part(name) for name in ("audio", "audio_url", "input_audio", "pdf_url")] == [
        "audio",
        "audio",
        "audio",
        "pdf",
    ]
    assert kinds.yields == {"pdf": "image"}


def test_suffixes_of_two_specs_of_a_kind_are_united():
    kinds = table(SOUND, {**SOUND, "suffixes": (".wav", ".m4a")})
    assert kinds.of_name("a.m4a") == kinds.of_name("a.flac") == kinds.of_name("a.wav") == "audio"


def test_the_longest_suffix_counts():
    volume = {**PDF, "kind": "volume", "suffixes": (".nii", ".nii.gz", ".ome.pdf")}
    kinds = table(SOUND, PDF, volume)
    names = ("a.nii.gz", "A.b.NII.GZ", "a.gz", "x/a.ome.pdf", "a.pdf", "a.ome", ".nii.gz", "nii.gz")
    found = [kinds.of_name(name) for name in names]
    assert found == ["volume", "volume", None, "volume", "pdf", None, None, None]


def test_two_kinds_with_one_suffix_conflict_where_it_is_met():
    kinds = table(SOUND, {**SOUND, "kind": "speech", "suffixes": (".wav",), "first_bytes": ()})
    assert kinds.of_name("a.flac") == "audio"
    assert kinds.of_name("a.jpg") == "image"
    with pytest.raises(PluginConflictError, match=r"'.wav' is claimed in `suffixes` by kind"):
        kinds.of_name("a.wav")
    with pytest.raises(PluginConflictError, match=r"blocked_plugins=\['p1'\]"):
        kinds.of_part("input_audio")


def test_first_bytes_conflict_too():
    kinds = table(SOUND, {**SOUND, "kind": "speech"})
    with pytest.raises(PluginConflictError, match="first_bytes"):
        kinds.of_bytes(b"fLaC")


def test_priority_decides_and_what_is_installed_wins_over_what_is_built_in():
    stickers = {"name": "w", "kind": "sticker", "factory": "a:b", "suffixes": (".webp",)}
    assert table(stickers).of_name("a.webp") == "sticker"
    assert table({**stickers, "priority": -1}).of_name("a.webp") == "image"
    with pytest.raises(PluginConflictError):
        table(stickers, is_builtin=True).of_name("a.webp")


def test_the_longest_first_bytes_count():
    stills = {"name": "c", "kind": "still", "factory": "a:b", "first_bytes": ((4, b"ftypcrx "),)}
    assert table(stills).of_bytes(b"0000ftypcrx ") == "still"
    assert table(stills).of_bytes(b"0000ftypisom") == "video"


def test_nobody_takes_the_part_types_of_another_kind():
    kinds = table({**SOUND, "part_types": ("image_url",), "priority": 9})
    assert kinds.of_part("image_url") == "image"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffixes", ("wav",)),
        ("suffixes", (".WAV",)),
        ("suffixes", ".wav"),
        ("suffixes", ("..gz",)),
        ("columns", "audio"),
        ("first_bytes", (b"x",)),
        ("first_bytes", b"fLaC"),
        ("first_bytes", ((511, b"ab"),)),
        ("first_bytes", ((-1, b"ab"),)),
        ("first_bytes", ("RIFF",)),
        ("part_types", ("text",)),
        ("part_types", ("Input",)),
        ("part_text", ""),
        ("yields", "Image"),
        ("yields", "audio"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field, value):
    with pytest.raises(PluginLoadError, match=f"MediaProcessorSpec s: {field} must be"):
        manager_of({**SOUND, field: value})


def test_what_is_split_has_no_text_of_its_own():
    with pytest.raises(PluginLoadError, match="part_text must be None with yields"):
        manager_of({**PDF, "part_text": "x"})


def test_one_plugin_gives_a_suffix_to_one_kind():
    with pytest.raises(PluginLoadError, match=r"gives '.wav' in `suffixes` to the kinds"):
        manager_of(SOUND, {**PDF, "suffixes": (".wav",)})


class Pages(MediaSplitter):
    kind = "pdf"

    def split(self, source, options, limits):
        return [SplitPart(source=source, label="page 1")]


def test_a_splitter_is_built_of_a_spec_that_yields():
    factory = f"{__name__}:Pages"
    manager = manager_of({**PDF, "factory": factory})
    (spec,) = manager.media_processors
    splitter = manager.build_splitter(spec)
    assert splitter.split(b"x", {}, None)[0].label == "page 1"
    manager = manager_of({**PDF, "factory": factory, "yields": None})
    with pytest.raises(PluginContractError, match="must be a MediaProcessor"):
        manager.build(manager.media_processors[0])
    manager = manager_of({**PDF, "factory": factory, "kind": "paper"})
    with pytest.raises(PluginContractError, match="has kind 'pdf', but its spec says 'paper'"):
        manager.build_splitter(manager.media_processors[0])
