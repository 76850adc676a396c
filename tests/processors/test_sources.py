"""Local files and data: URLs as sources of media."""

import base64
import os
from dataclasses import replace

import pytest
from mmdeploy_llm_processors.sources import fetch_media

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef


def fetch(uri, kind="image", **limits):
    return fetch_media(MediaRef(kind=kind, uri=str(uri)), replace(MediaLimits(), **limits))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a picture#1?.png"
    path.write_bytes(b"content")
    return path


def test_paths_and_file_urls(file):
    assert fetch(file) == b"content"
    assert fetch(file.as_uri()) == b"content"
    assert (
        fetch("file://localhost" + str(file).replace(" ", "%20").replace("#", "%23")) == b"content"
    )
    assert fetch(f"FILE://{file}") == b"content"


@pytest.mark.parametrize("form", ["{}/gone.png", "{}/x/../gone.png", "file://{}/gone%2epng"])
def test_a_missing_file_is_named_as_it_was_given(tmp_path, form):
    given = form.format(tmp_path)
    with pytest.raises(MediaError) as caught:
        fetch(given)
    assert str(caught.value) == f"image file {given!r} does not exist"


def test_a_message_never_names_what_a_link_leads_to(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hidden")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("link", "link/gone.png", "loop"):
        with pytest.raises(MediaError) as caught:
            fetch(tmp_path / name)
        assert f"image file {str(tmp_path / name)!r} " in str(caught.value)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("uri", ["", "x" * 5000, "a\0b", "bad/" * 2000])
def test_unusable_paths(uri):
    with pytest.raises(MediaError) as caught:
        fetch(uri)
    assert len(str(caught.value)) < 700


def test_only_regular_files(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, "/dev/zero"):
        with pytest.raises(MediaError, match="not a regular file"):
            fetch(path)


def test_unreadable_file(file):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    file.chmod(0)
    with pytest.raises(MediaError, match="permission denied"):
        fetch(file)


def test_byte_limit_is_checked_before_reading(tmp_path):
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MediaLimitError, match="1099511627776 bytes, 268435456 are allowed"):
        fetch(path)
    path.write_bytes(b"12345")
    assert fetch(path, max_bytes=5) == b"12345"
    with pytest.raises(MediaLimitError, match="5 bytes, 4 are allowed"):
        fetch(path, max_bytes=4)


def test_allowed_root_with_links_resolved(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "secret.png"
    root.mkdir()
    outside.write_bytes(b"secret")
    (root / "in.png").write_bytes(b"inside")
    (root / "link.png").symlink_to(outside)
    (root / "fine.png").symlink_to(root / "in.png")
    (tmp_path / "to_root").symlink_to(root)
    assert fetch(root / "in.png", allowed_root=root) == b"inside"
    assert fetch(root / "fine.png", allowed_root=tmp_path / "to_root") == b"inside"
    for path in (outside, root / ".." / "secret.png", root / "link.png", tmp_path / "rooted"):
        (tmp_path / "rooted").write_bytes(b"x")
        with pytest.raises(MediaError, match="allowed_media_root") as caught:
            fetch(path, allowed_root=root)
        assert str(caught.value).startswith(f"image file {str(path)!r} is outside")


def test_a_url_of_no_known_scheme_shows_no_secrets():
    with pytest.raises(MediaError) as caught:
        fetch("my_store://user:secret@bucket/x.png?token=secret")
    assert "'my_store://bucket/x.png'" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_loop_of_links(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(MediaError, match="cannot be read"):
        fetch(tmp_path / "loop")


def test_file_urls_of_other_hosts():
    for uri in ("file://server/share/x.png", "file://[broken"):
        with pytest.raises(MediaError, match="file://"):
            fetch(uri)


def test_urls_of_all_kinds_are_left_to_others():
    for uri in ("http://host/x.png", "HTTPS://host/x.png", " https://host/x.png", "s3://b/x.png"):
        assert fetch(uri) is None
        assert fetch(uri, allow_urls=True) is None


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64," + base64.b64encode(b"content").decode(),
        "data:image/png;base64," + base64.b64encode(b"content").decode().rstrip("="),
        "data:;base64,Y29u\n dGVudA==",
        "data:image/png;name=x;base64,Y29udGVudA%3D%3D",
        "DATA:application/octet-stream;BASE64,Y29udGVudA==",
        "data:,content",
        "data:image/svg+xml,%63ontent",
    ],
)
def test_data_urls(uri):
    assert fetch(uri) == b"content"


@pytest.mark.parametrize(
    ("uri", "kind", "message"),
    [
        ("data:image/png;base64", MediaError, "no comma"),
        ("data:image/png;base64,Y29!", MediaError, "base64"),
        ("data:image/png;base64,Y29uü", MediaError, "base64"),
        ("data:image/png;base64,Y", MediaError, "base64"),
        ("data:video/mp4;base64,Y29u", UnsupportedMediaError, "type video was given as image"),
        ("data:text/plain,hello", UnsupportedMediaError, "text"),
    ],
)
def test_wrong_data_urls(uri, kind, message):
    with pytest.raises(kind, match=message):
        fetch(uri)


def test_data_url_byte_limit():
    for payload in (";base64," + base64.b64encode(b"x" * 100).decode(), "," + "x" * 100):
        assert len(fetch("data:" + payload, max_bytes=100)) == 100
        with pytest.raises(MediaLimitError, match="99 are allowed"):
            fetch("data:" + payload, max_bytes=99)
    with pytest.raises(MediaLimitError):
        fetch("data:;base64," + "A" * 10_000, max_bytes=10)
