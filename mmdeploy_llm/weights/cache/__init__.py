"""Keeps the weights of a model as the kernels lay them out, rounded or not, in a file from which
the next process maps them: nothing is read twice, packed or rounded again, and processes share it.

    model files, options, machine --key.py--> name of the file in the folder
    model --record.py--> tensors and what they are for --file.py--> file, with a digest of all

folder.py says whose files are trusted, and which leave when there are too many. The cache is never
needed: whatever is wrong with it, the model is read from its own files.
"""

from mmdeploy_llm.weights.read_ahead import cache_folder

from .cache import WeightCache
from .folder import FolderSize, folder_size
from .key import source_key
from .opening import open_cache
from .record import NotKeptError

__all__ = [
    "FolderSize",
    "NotKeptError",
    "WeightCache",
    "cache_folder",
    "folder_size",
    "open_cache",
    "source_key",
]
