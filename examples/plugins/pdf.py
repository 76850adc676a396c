"""PDF documents as a plugin of one file: each page is an image, drawn in a process that may die."""

from hashlib import blake2b

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaProcessorSpec, MediaSplitter, SplitPart, hookimpl
from mmdeploy_llm.media import Drawing, Workers


@hookimpl
def provide_media_processors():
    """Lists the splitter, for all models that take images."""
    kind = {"suffixes": (".pdf",), "columns": ("pdf",), "first_bytes": (b"%PDF-",)}
    spec = {"name": "pages-of-one-file", "kind": "pdf", "factory": f"{__name__}:Documents"}
    return [MediaProcessorSpec(**spec, **kind, yields="image")]


class Documents(MediaSplitter):
    """Splits documents into pages; {"pdf": path, "pages": "2-5"} chooses some."""

    kind = "pdf"
    markers = ("<pdf>",)

    def __init__(self, checkpoint, options):
        self.workers = Workers()

    def split(self, source, options, limits):
        """Reads the sizes of the pages; draws none."""
        if not isinstance(source, bytes):
            raise UnsupportedMediaError(f"a pdf is a file, got {type(source).__name__}")
        if set(options) - {"pages"}:
            raise MediaError(f"a pdf has no option {', '.join(options)}; known: pages")
        limits.check_bytes(len(source), "the pdf")
        [(found, _)] = self.workers.decode(read_sizes, source, limits)
        sizes = found["sizes"]
        first, _, last = str(options.get("pages", f"1-{len(sizes)}")).partition("-")
        is_range = first.isdecimal() and (last or first).isdecimal()
        if not is_range or not 1 <= int(first) <= int(last or first) <= len(sizes):
            raise MediaError(f"pages must be such as 2 or 2-5, of {len(sizes)} pages")
        numbers = range(int(first), int(last or first) + 1)
        pages = [Page(self.workers, source, number, sizes[number - 1]) for number in numbers]
        return [SplitPart(source=page, label=f"page {page.number}") for page in pages]

    def close(self):
        """Ends the processes."""
        self.workers.close()


class Page(Drawing):
    """A page that is drawn when a model sees it, at the size at which it does."""

    def __init__(self, workers, blob, number, size):
        self.workers, self.blob, self.number = workers, blob, number
        self.size = tuple(max(1, round(points * 150 / 72)) for points in size)  # 150 dpi
        self.digest = f"{blake2b(blob, digest_size=20).hexdigest()} {number}"

    def draw(self, size, limits):
        """See Drawing."""
        args = {"index": self.number - 1, "size": list(size)}
        [(_, pixels)] = self.workers.decode(draw, self.blob, limits, **args)
        return pixels


def read_sizes(blob, limits):
    """Runs in the process: yields the sizes of all pages, in points."""
    import pypdfium2

    document = pypdfium2.PdfDocument(blob)
    yield {"sizes": [document.get_page_size(number) for number in range(len(document))]}, None


def draw(blob, limits, index, size):
    """Runs in the process: yields a page on white, uint8 [height, width, 3]."""
    import numpy
    import pypdfium2

    page = pypdfium2.PdfDocument(blob)[index]
    scale = max(size[0] / page.get_width(), size[1] / page.get_height())
    image = page.render(scale=scale).to_pil().convert("RGB").resize(size)
    yield {}, numpy.asarray(image)
