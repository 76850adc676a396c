"""Plugin `cards`."""

from mmdeploy_llm.hooks import CorpusFormatSpec, hookimpl

MMDEPLOY_LLM_API = (1, 0)


@hookimpl
def provide_corpus_formats():
    return [
        CorpusFormatSpec(
            name="cards",
            suffixes=(".cards",),
            reader="cards_llm.reader:read",
            first_bytes=(b"CARDS 1\n",),
        )
    ]
