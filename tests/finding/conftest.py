"""A folder of small pictures."""

import pytest


@pytest.fixture
def pictures(tmp_path, png):
    """A folder with 1.png, 2.png, 10.png, bad.jpg (corrupt), a text file and a subfolder."""
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for name in ("1.png", "2.png", "10.png", "sub/3.PNG", ".hidden.png"):
        (folder / name).write_bytes(png)
    (folder / "bad.jpg").write_bytes(b"\xff\xd8\xff not a picture")
    (folder / "notes.txt").write_text("no picture")
    return folder
