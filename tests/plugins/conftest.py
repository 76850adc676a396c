"""Shared by the tests of plugins: one thread, and a tokenizer of bytes."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.testing.plugins import fresh, probe


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Uses one thread: on tiny models, dispatching work takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_process_for_all(monkeypatch):
    """No process that imports torch for each plugin; a test looks at all in one."""
    monkeypatch.setattr(fresh, "changes_of", lambda modules: {})
    monkeypatch.setattr(probe, "CHANGES", "")


@pytest.fixture(scope="session")
def byte_tokenizer():
    """byte_tokenizer(special, eos): tokenizes each byte, and each special text, as one token."""

    def make(special, eos):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True) for text in special])
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)

    return make
