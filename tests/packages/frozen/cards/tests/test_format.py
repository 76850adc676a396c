from cards_llm import provide_corpus_formats
from mmdeploy_llm.testing import CorpusFormatConformance, PluginConformance


def card(name, text):
    return f"{name} {len(text)}\n".encode() + text + b"\n"


def write(path, rows):
    rows = list(rows)
    for row in rows:
        if not isinstance(row["text"], str) or "\n" in row["id"] or not row["id"]:
            raise ValueError("a card has a text")
    cards = (card(row["id"], row["text"].encode()) for row in rows)
    path.write_bytes(b"CARDS 1\n" + b"".join(cards))


ONE, TWO = {"id": "one", "text": "Was ist das?"}, {"id": "two words", "text": "一\n二"}
FILE = b"CARDS 1\n" + b"".join(card(row["id"], row["text"].encode()) for row in (ONE, TWO))


class TestPlugin(PluginConformance):
    plugin = "cards_llm"


class TestCards(CorpusFormatConformance):
    spec = provide_corpus_formats()[0]
    samples = {"two": FILE}
    rows = {"two": [ONE, TWO]}
    damaged = {"no text": (FILE + card("bad", b"\xff\xfe"), [ONE, TWO, None])}
    write = staticmethod(write)
    column = "text"
    values = {"two lines": "a\nb", "letters": "Grüße, 你好", "empty": "", "long": "x" * 5000}
