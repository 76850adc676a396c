"""The same folder gives the same vectors and scores as in sentence-transformers: last token and
mean, prompts, dense layers, conversations, pairs, yes and no."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from mmdeploy_llm import LLM
from mmdeploy_llm.testing.tiny import write_tiny

pytestmark = pytest.mark.full
TEXTS = ["a cat", "the quick brown fox jumps over the lazy dog " * 4, "x", "Hello, World! 12345"]
QUERY = "which animal jumps?"
TOLERANCE = 1e-5
ROLES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def st():
    """sentence-transformers and its modules; importing them takes seconds."""
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from sentence_transformers.sentence_transformer import modules

    names = ("Dense", "Normalize", "Pooling", "Transformer")
    own = {name: getattr(modules, name) for name in names}
    return SimpleNamespace(
        Vectors=SentenceTransformer, Pairs=CrossEncoder, LogitScore=LogitScore, **own
    )


def write(source, folder, auto=transformers.AutoModel, ends=False, template=None, **options):
    """Writes a tiny model with another head. ends: its tokenizer adds the end of a text; template:
    of its conversations."""
    model = auto.from_pretrained(source, **options)
    words = transformers.AutoTokenizer.from_pretrained(source)
    if hasattr(model, "score"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            torch.nn.init.normal_(model.score.weight, std=0.3)
        model.config.pad_token_id = words.pad_token_id
    if ends:
        words.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {words.eos_token}",
            special_tokens=[(words.eos_token, words.eos_token_id)],
        )
    words.chat_template = template
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def load(folder):
    return LLM(str(folder), max_model_len=512, kv_cache_memory=2**24)


def assert_same(theirs, outputs, name="embedding"):
    assert all(output.is_ok for output in outputs), [output.error_msg for output in outputs]
    found = np.array([getattr(output, name) for output in outputs])
    np.testing.assert_allclose(found, np.asarray(theirs), atol=TOLERANCE, rtol=TOLERANCE)


def test_the_last_token_with_a_prompt(st, tiny_folder, tmp_path):
    """Qwen3-Embedding has it so: the tokenizer adds the token whose state is the vector."""
    first = st.Transformer(write(tiny_folder("qwen3"), tmp_path / "plain", ends=True))
    size = first.get_embedding_dimension()
    made = st.Vectors(
        modules=[first, st.Pooling(size, "lasttoken"), st.Normalize()],
        prompts={"query": "Instruct: find it\nQuery:"},
    )
    made.save(str(tmp_path / "model"))
    theirs = st.Vectors(str(tmp_path / "model"), device="cpu")
    with load(tmp_path / "model") as llm:
        assert_same(theirs.encode(TEXTS), llm.embed(TEXTS))
        by_name = llm.embed(TEXTS, instruction="query")
        assert_same(theirs.encode(TEXTS, prompt_name="query"), by_name)
        by_text = llm.embed(TEXTS, instruction="Do: ")
        assert_same(theirs.encode(TEXTS, prompt="Do: "), by_text)
        assert_same(theirs.encode(TEXTS, truncate_dim=8), llm.embed(TEXTS, dimensions=8))
        short = theirs.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
        assert_same(short, llm.embed(TEXTS, dimensions=8, normalize=True))
        scores = theirs.similarity(theirs.encode_query([QUERY]), theirs.encode_document(TEXTS))
        assert_same(scores[0], llm.score(QUERY, TEXTS), "score")
        (refused,) = llm.generate("a")
        assert "call LLM.embed" in refused.error_msg


@pytest.mark.parametrize("include_prompt", [True, False])
def test_the_mean_with_dense_layers(st, tiny_folder, tmp_path, include_prompt):
    first = st.Transformer(write(tiny_folder("mistral"), tmp_path / "plain"))
    size = first.get_embedding_dimension()
    identity = torch.nn.Identity()
    made = st.Vectors(
        modules=[
            first,
            st.Pooling(size, "mean", include_prompt=include_prompt),
            st.Dense(size, 96),
            st.Dense(96, 24, bias=False, activation_function=identity, use_residual=True),
            st.Normalize(),
        ],
        prompts={"say": "Say it: ", "ask": "Ask: "},
        default_prompt_name="say",
    )
    made.save(str(tmp_path / "model"))
    theirs = st.Vectors(str(tmp_path / "model"), device="cpu")
    with load(tmp_path / "model") as llm:
        assert_same(theirs.encode(TEXTS), llm.embed(TEXTS))
        assert_same(theirs.encode(TEXTS, prompt_name="ask"), llm.embed(TEXTS, instruction="ask"))
        assert_same(theirs.encode(TEXTS, prompt=""), llm.embed(TEXTS, instruction=""))


def test_vectors_of_conversations(st, tiny_folder, tmp_path):
    plain = write(tiny_folder("qwen2"), tmp_path / "plain", template=ROLES)
    options = {"chat_template": {"add_generation_prompt": True}}
    first = st.Transformer(plain, processing_kwargs=options)
    size = first.get_embedding_dimension()
    made = st.Vectors(
        modules=[first, st.Pooling(size, "lasttoken"), st.Normalize()],
        prompts={"all": "Represent it."},
        default_prompt_name="all",
    )
    made.save(str(tmp_path / "model"))
    theirs = st.Vectors(str(tmp_path / "model"), device="cpu")
    with load(tmp_path / "model") as llm:
        assert_same(theirs.encode(TEXTS), llm.embed(TEXTS))
        assert_same(theirs.encode(TEXTS, prompt="Hm."), llm.embed(TEXTS, instruction="Hm."))
        assert_same(theirs.encode(TEXTS, prompt=""), llm.embed(TEXTS, instruction=""))


def test_attention_in_both_directions(st, tmp_path):
    """EmbeddingGemma has it so: the mean, two dense layers; windows in most layers."""
    folder = write_tiny("gemma3_text", tmp_path / "tiny", use_bidirectional_attention=True)
    first = st.Transformer(write(folder, tmp_path / "plain"))
    size = first.get_embedding_dimension()
    identity = torch.nn.Identity()
    wide, narrow = (
        st.Dense(*sizes, bias=False, activation_function=identity)
        for sizes in ((size, 96), (96, size))
    )
    modules = [first, st.Pooling(size, "mean"), wide, narrow, st.Normalize()]
    made = st.Vectors(modules=modules, prompts={"query": "task: search result | query: "})
    made.save(str(tmp_path / "model"))
    theirs = st.Vectors(str(tmp_path / "model"), device="cpu")
    with load(tmp_path / "model") as llm:
        assert_same(theirs.encode(TEXTS), llm.embed(TEXTS))
        assert_same(theirs.encode_query(TEXTS), llm.embed(TEXTS, instruction="query"))


def compare_pairs(st, folder, **prompt):
    theirs = st.Pairs(str(folder), device="cpu")
    pairs = [(QUERY, text) for text in TEXTS]
    with load(folder) as llm:
        assert_same(theirs.predict(pairs), llm.score(QUERY, TEXTS), "score")
        own = llm.score(QUERY, TEXTS, instruction="Judge: ")
        assert_same(theirs.predict(pairs, prompt="Judge: "), own, "score")


def test_a_head_of_one_label_scores_pairs(st, tiny_folder, tmp_path):
    labels = transformers.AutoModelForSequenceClassification
    plain = write(tiny_folder("qwen3"), tmp_path / "plain", labels, num_labels=1)
    st.Pairs(plain, device="cpu").save_pretrained(str(tmp_path / "model"))
    compare_pairs(st, tmp_path / "model")


@pytest.mark.parametrize("begins", [True, False])
def test_a_template_of_pairs(st, tiny_folder, tmp_path, begins):
    labels = transformers.AutoModelForSequenceClassification
    plain = write(tiny_folder("llama"), tmp_path / "plain", labels, num_labels=1, template=ROLES)
    options = {"chat_template": {"add_generation_prompt": True}} if begins else {}
    first = st.Transformer(
        plain, transformer_task="sequence-classification", processing_kwargs=options
    )
    made = st.Pairs(modules=[first], prompts={"all": "Judge."}, default_prompt_name="all")
    made.save_pretrained(str(tmp_path / "model"))
    compare_pairs(st, tmp_path / "model")


@pytest.mark.parametrize("no", [4, None])
def test_yes_and_no(st, tiny_folder, tmp_path, no):
    words = transformers.AutoModelForCausalLM
    plain = write(tiny_folder("qwen3"), tmp_path / "plain", words, template=ROLES)
    first = st.Transformer(plain, transformer_task="text-generation")
    made = st.Pairs(modules=[first, st.LogitScore(9, no)], device="cpu")
    made.save_pretrained(str(tmp_path / "model"))
    compare_pairs(st, tmp_path / "model")
