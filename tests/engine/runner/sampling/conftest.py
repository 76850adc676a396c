"""Requests, samplers and grammars for the tests of sampling."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.engine.runner.sampling.grammar import GrammarBackend
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.sampling.state import SlotRequest
from mmdeploy_llm.values.params import SamplingParams

RESOLVED = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "max_tokens": 1000,
    "seed": 1,
}
REQUEST_FIELDS = set(SlotRequest.__dataclass_fields__) - {"params"}

EOS = 256
VOCAB_SIZE = 300  # wider than the tokenizer's


@pytest.fixture(scope="module")
def one_thread():
    """Uses one thread for the many small operations, which threads only slow down on a busy
    machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def make_request():
    """Returns a greedy request; keywords are fields of SlotRequest or of SamplingParams."""

    def make(**fields):
        own = {name: fields.pop(name) for name in REQUEST_FIELDS & set(fields)}
        own.setdefault("prompt_token_ids", (1, 2, 3))
        return SlotRequest(params=SamplingParams(**{**RESOLVED, **fields}), **own)

    return make


@pytest.fixture(scope="session")
def make_sampler():
    """Returns a sampler with the given requests in slots 0, 1, ..."""

    def make(requests, vocab_size, grammars=None, num_slots=None):
        sampler = Sampler(
            max_num_slots=num_slots or len(requests),
            vocab_size=vocab_size,
            device=torch.device("cpu"),
            grammars=grammars,
        )
        for slot, request in enumerate(requests):
            sampler.add(slot, request)
        return sampler

    return make


@pytest.fixture(scope="module")
def tokenizer():
    """Returns a tokenizer of bytes, an end of sequence and two merges."""
    vocab = {one: index for index, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<eos>": EOS, "he": EOS + 1, "tr": EOS + 2}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("t", "r")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


@pytest.fixture(scope="module")
def shared(tokenizer):
    backend = GrammarBackend(tokenizer, VOCAB_SIZE, {EOS})
    yield backend
    backend.close()


@pytest.fixture
def backend(shared):
    return shared


@pytest.fixture
def own_backend(tokenizer):
    """Returns a backend whose cache is empty."""
    backend = GrammarBackend(tokenizer, VOCAB_SIZE, {EOS})
    yield backend
    backend.close()
