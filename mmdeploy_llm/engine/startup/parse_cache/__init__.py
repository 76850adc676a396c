"""Keeps what transformers has made of a model's config and tokenizer as plain values, from which
the next process goes on without importing transformers.

    files of the model --transformers--> config, tokenizer          the first start
        config --config.py-->  values, names that have none  ---\\
        tokenizer --tokenizer.py--> its backend's JSON, values ---> file in the folder of weights
    file --> StandIn, which answers what is kept and loads the real object for anything else

stand_in.py says when that is. Plugins of other packages always get transformers' own objects. The
cache is never needed: whatever is wrong with it, transformers reads the model's files.
"""

from .cache import ParseCache

__all__ = ["ParseCache"]
