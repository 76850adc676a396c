"""Regression tests for classes of published advisories on inference engines, named after them."""

import contextlib
import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm.errors import (
    ConfigError,
    MediaError,
    MediaLimitError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits, MediaRef
from mmdeploy_llm.values.params import GuidedDecodingParams, SamplingParams

PLACE = "<|image_pad|>"
HERE = {"allow_urls": True, "allowed_domains": ("127.0.0.1",), "allow_private_addresses": True}


def test_ssrf_cve_2025_6242_cve_2026_34753_cve_2026_33626(manager):
    """URLs of this machine, of private networks and of cloud metadata services, in every
    spelling."""
    hosts = (
        "127.0.0.1",
        "127.1",
        "0x7f000001",
        "2130706433",
        "017700000001",
        "0.0.0.0",
        "localhost",
        "[::1]",
        "[::]",
        "[::ffff:7f00:1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "[fd00:ec2::254]",
        "10.0.0.1",
        "192.168.0.1",
    )
    limits = MediaLimits(allow_urls=True, fetch_timeout=2)
    for host in hosts:
        with pytest.raises(MediaError, match=r"not a public one|name is not known"):
            manager.fetch_media(MediaRef(kind="image", uri=f"http://{host}/x"), limits)


def test_redirect_bypass_cve_2026_63764(manager, serve):
    """The first host is allowed, but not the one that it redirects to."""
    server = serve({"/x": "http://localhost:1/y", "/loop": "/loop"})
    for path, message in (("/x", "localhost is not in allowed"), ("/loop", "more than 5")):
        ref = MediaRef(kind="image", uri=server.url + path)
        with pytest.raises(MediaError, match=message):
            manager.fetch_media(ref, MediaLimits(**HERE))


@pytest.mark.parametrize(
    "url",
    [
        "http://good.org\\@evil.org/x",
        "http://good.org@evil.org/x",
        "http://evil.org\\.good.org/x",
        "http://evil.org\t.good.org/x",
        "http://evil.org#@good.org/x",
        "http://evil.org?@good.org/x",
        "http://evil.org%2f.good.org/x",
        "http://good.org:80@evil.org/x",
        "http:\\\\evil.org/x",
        "http:///evil.org/x",
    ],
)
def test_parser_disagreement_cve_2026_24779_cve_2026_25960(manager, url):
    limits = MediaLimits(allow_urls=True, allowed_domains=("good.org", "*.good.org"))
    with pytest.raises(MediaError) as caught:
        manager.fetch_media(MediaRef(kind="image", uri=url), limits)
    assert "name is not known" not in str(caught.value)  # refused, not looked up


def test_typed_placeholders_cve_2026_44222(real, picture):
    intake = real()
    for text in (PLACE, f"{PLACE}{PLACE} hello", f"<|start|>{PLACE}<|end|>"):
        with pytest.raises(RequestError):
            intake.accept(text, SamplingParams())
        messages = [{"role": "user", "content": text}]
        (request,) = intake.accept({"messages": messages}, SamplingParams())
        assert request.media == ()


@pytest.mark.full
def test_typed_placeholders_are_replaced_in_linear_time_cve_2025_46560(real):
    messages = [{"role": "user", "content": PLACE * 5_000}]
    start = time.monotonic()
    with pytest.raises(RequestError):  # too long
        real().accept({"messages": messages}, SamplingParams())
    assert time.monotonic() - start < 60


def test_hash_ignores_shape_cve_2025_46722(real, generate):
    """The same bytes with another shape or mode are another item."""
    intake = real()
    flat = np.arange(64 * 128 * 3, dtype=np.uint8)
    gray = Image.fromarray(flat[: 64 * 128].reshape(64, 128))
    palette = gray.convert("P")
    palette.putpalette(list(range(255, -1, -1)) * 3)
    images = [
        Image.fromarray(flat.reshape(64, 128, 3)),
        Image.fromarray(flat.reshape(128, 64, 3)),
        gray,
        gray.transpose(Image.Transpose.ROTATE_90),
        palette,
    ]
    keys = [generate(intake, image).media[0].item.key for image in images]
    assert len(set(keys)) == len(images)


def zeros_png(width, height):
    """A valid PNG of black pixels, a thousandth of its decoded size."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + width * 3)) for _ in range(height))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", rows + packer.flush())
    return b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b"")


def bomb(format, width, height):
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, format)
    return buffer.getvalue()


@pytest.mark.full
def test_decompression_bombs_cve_2026_40192_cve_2026_54233(real, generate):
    """Images are refused by the size in their header, before a pixel is decoded."""
    bombs = [zeros_png(4000, 4000), bomb("GIF", 4000, 4000), bomb("TIFF", 4000, 4000)]
    for blob in bombs:
        start = time.monotonic()
        with pytest.raises(MediaLimitError, match="16000000"):
            generate(real(max_pixels=1_000_000), blob)
        assert time.monotonic() - start < 60


@pytest.mark.full
def test_decompression_bomb_in_text_chunks(real, generate):
    """Compressed text in a PNG can be a bomb too."""
    text = zlib.compress(bytes(60_000_000), 9)
    data = b"Comment\0\0" + text
    chunk = (
        struct.pack(">I", len(data))
        + b"zTXt"
        + data
        + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    )
    blob = zeros_png(56, 56)
    blob = blob[:33] + chunk + blob[33:]
    start = time.monotonic()
    with contextlib.suppress(MediaError):  # refusing it is as good as leaving the text alone
        generate(real(), blob)
    assert time.monotonic() - start < 60


def test_unbounded_frames_cve_2026_34755_cve_2026_105758():
    videos = pytest.importorskip("mmdeploy_llm.media.video.frames")
    frames = np.zeros((9, 28, 28, 3), dtype=np.uint8)
    with pytest.raises(MediaLimitError, match="9 frames, 8 are allowed"):
        videos.FrameList(frames, MediaLimits(max_frames=8))


def test_huge_n_cve_2026_34756():
    for n in (0, -1, 1025, 10**9):
        with pytest.raises(ConfigError):
            SamplingParams(n=n)


@pytest.mark.full
@pytest.mark.parametrize(
    "regex", ["(a+)+$", "((a{1,99}){1,99}){1,99}", "a{1,100000000}", "(.*a){200}", "(x+x+)+y{500}"]
)
def test_redos_cve_2026_55574_pysec_2026_3933_cve_2025_71379(regex, raw_tokenizer):
    """Patterns that stop a backtracking engine compile or are refused, in bounded time."""
    pytest.importorskip("llguidance", reason="needs llguidance: the extra 'guided'")
    from mmdeploy_llm.engine.runner.sampling.grammar import GrammarBackend

    with contextlib.closing(GrammarBackend(raw_tokenizer, len(raw_tokenizer), {2})) as backend:
        start = time.monotonic()
        with contextlib.suppress(RequestError):
            backend.validate(GuidedDecodingParams(regex=regex))
        assert time.monotonic() - start < 60


def test_redos_grammars_are_bounded_in_size_cve_2025_29770(raw_tokenizer):
    pytest.importorskip("llguidance", reason="needs llguidance: the extra 'guided'")
    from mmdeploy_llm.engine.runner.sampling.grammar import CACHE_SIZE, GrammarBackend

    backend = GrammarBackend(raw_tokenizer, len(raw_tokenizer), {2})
    with pytest.raises(RequestError, match="characters"):
        backend.validate(GuidedDecodingParams(regex="a" * 200_000))
    assert CACHE_SIZE <= 1000


def test_remote_code_cve_2026_27893_cve_2025_66448_cve_2026_5241():
    from mmdeploy_llm.values.options.config import EngineConfig

    with pytest.warns(UserWarning, match="never run"):
        config = EngineConfig(model="m", trust_remote_code=True)
    assert config.trust_remote_code is False


def test_address_leak_cve_2026_22778_cve_2026_54236(real, generate):
    """Pillow names its input by its memory address; no message contains it."""
    for blob in (b"x" * 100, b"\x89PNG\r\n\x1a\n" + b"\0" * 50, b"RIFF\0\0\0\0WEBPVP8 ", object()):
        with pytest.raises(RequestError) as caught:
            generate(real(), blob)
        assert "0x" not in str(caught.value)


def test_eps_cve_2026_115915(real, generate):
    blob = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/tmp/x) (w) file\n"
    with pytest.raises(UnsupportedMediaError):
        generate(real(), blob)


def test_count_limits_before_materialising_cve_2026_100650(make_intake, processor):
    class Untouchable:
        def read(self, *args):
            raise AssertionError("was read")

    prompt = {"prompt": PLACE * 9, "multimodal_data": {"image": [Untouchable()] * 9}}
    with pytest.raises(MediaLimitError, match="Too many image items"):
        make_intake().accept(prompt, SamplingParams())
    assert processor.calls == []


def test_upload_read_fully_before_the_limit_cve_2026_55646(real, generate):
    class Endless:
        num_read = 0

        def read(self, num_bytes=-1):
            assert 0 <= num_bytes <= 1001
            self.num_read += num_bytes
            return b"x" * num_bytes

    file = Endless()
    with pytest.raises(MediaLimitError):
        generate(real(max_bytes=1000), file)
    assert file.num_read == 1001


def test_cache_growth_pysec_2026_4361(make_intake):
    intake = make_intake(cache_bytes=300)
    for number in range(2, 30):
        source = {"prompt": PLACE, "multimodal_data": {"image": str(number).encode()}}
        intake.accept(source, SamplingParams())
    assert intake.media.stats["processed"].num_bytes <= 300


@pytest.mark.full
def test_template_from_request_cve_2026_5760_pysec_2026_2013(real):
    """Template errors become errors of the request, and a template cannot reach Python objects."""
    messages = [{"role": "user", "content": "hi"}]
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ tojson.__globals__ }}",
        "{{ 'x'.format.__self__.__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages|map(attribute='__class__')|list|first|attr('__mro__') }}",
    ):
        with pytest.raises(RequestError, match=r"SecurityError|UndefinedError|not in the prompt"):
            real().accept({"messages": messages, "chat_template": attack}, SamplingParams())


def test_path_traversal_cve_2026_7302(real, generate, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    intake = real(allowed_root=root.resolve())
    for path in ("../secret.png", "x/../../secret.png", "./../secret.png", "..%2fsecret.png"):
        for name in (str(root / path), (root / path).as_posix(), f"file://{root}/{path}"):
            with pytest.raises(MediaError) as caught:
                generate(intake, name)
            assert "secret_folder" not in str(caught.value)


def test_pickle_of_prompt_data_cve_2025_62164_cve_2026_56340(real, generate):
    """Serialised tensors are treated as any other bytes: they are no image and are never loaded."""
    import pickle

    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("was unpickled",))

    for blob in (pickle.dumps(Evil()), b"PK\x03\x04" + b"\0" * 60, b"\x93NUMPY\x01\0" + b"\0" * 60):
        with pytest.raises(UnsupportedMediaError):
            generate(real(), blob)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (1, 3000)])
def test_tiny_images_cve_2026_22773(size, real, generate):
    """A tiny item is processed or refused; it never breaks the intake."""
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    with contextlib.suppress(RequestError):
        request = generate(real(), buffer.getvalue())
        assert request.media[0].item.num_tokens >= 1
