"""Decode steps from CUDA graphs: the chosen size, the padding, and the same tokens as without
graphs. The recorder of these tests runs Python again where CUDA would replay kernels."""

import numpy as np
import pytest
import torch

from mmdeploy_llm.engine.runner.graphs import DecodeGraphs, DecodeOutputs, graph_sizes
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.engine.runner.step_inputs import DecodeFrame, Paging, StepArrays
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens, StepPlan

CPU = torch.device("cpu")
VOCAB, HIDDEN, BLOCK, CONTEXT = 50, 8, 4, 32
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0, "max_tokens": 9}


class Recorder:
    """A recorder whose replay computes again, into the outputs of the recording."""

    def __init__(self, breaks_at=None):
        self.breaks_at, self.num_replays, self.is_recovered = breaks_at, 0, False
        self.num_recorded = 0

    def record(self, compute):
        self.num_recorded += 1
        if self.num_recorded == self.breaks_at:
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            finally:  # as torch does when it ends the recording
                raise ValueError("the recording was ended by an earlier error")
        outputs = compute()

        def replay():
            self.num_replays += 1
            outputs.take(compute())

        return replay, outputs

    def recover(self):
        self.is_recovered = True


class TensorAttention:
    """Decode attention that reads only the tensors of the layout, as recorded attention must.
    Layouts with host lists use the reference."""

    name, can_capture = "tensors", True

    def begin(self, layout, cache):
        if layout.query_lens:
            return ReferenceAttention().begin(layout, cache)
        self.layout, self.cache = layout, cache
        return self

    def attend(self, layer, q, k, v, **options):
        keys, values = self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)
        out = torch.zeros_like(q)
        for row, slot in enumerate(self.layout.slots.tolist()):
            if slot >= 0:
                keys[slot], values[slot] = k[row], v[row]
            length = int(self.layout.lengths.context_lens[row])
            places = torch.arange(length)
            at = self.layout.block_tables[row][places // BLOCK].long() * BLOCK + places % BLOCK
            scores = torch.einsum("hd,lhd->hl", q[row], keys[at]) * q.shape[-1] ** -0.5
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values[at])
        return out


class Model:
    """A model with one attention layer, so that a wrong block or a stray write changes tokens."""

    num_layers, num_kv_heads, head_dim, hidden_size = 1, 1, HIDDEN, HIDDEN

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.place = torch.randn(CONTEXT, HIDDEN, generator=generator)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.num_rows = []

    def forward(self, inputs):
        self.num_rows.append(len(inputs.token_ids))
        hidden = self.embed[inputs.token_ids] + self.place[inputs.positions % CONTEXT]
        heads = hidden[:, None]
        return hidden + inputs.attn.attend(0, heads, heads, heads)[:, 0]

    def logits(self, hidden):
        return hidden @ self.head

    def positions(self, num_tokens, media):
        return None


def make(sizes=None, recorder=None, **options):
    shape = KVCacheShape.uniform(
        num_layers=1, num_kv_heads=1, head_dim=HIDDEN, block_size=BLOCK, dtype=torch.float32
    )
    runner = Runner(
        model=Model(),
        backend=options.get("backend", TensorAttention()),
        cache=allocate(shape, 64, CPU),
        sampler=Sampler(max_num_slots=8, vocab_size=VOCAB, device=CPU),
        slots=Slots(8, CONTEXT, BLOCK),
        device=CPU,
    )
    if sizes:
        runner.record_graphs(sizes, recorder or Recorder())
    return runner


def new(name, token_ids, **values):
    params = SamplingParams(**{**NEUTRAL, "temperature": 0.0, **values})
    return NewRequest(
        request_id=name,
        token_ids=tuple(token_ids),
        prompt_len=len(token_ids),
        params=params,
        eos_token_ids=frozenset(),
    )


def generate(runner, requests, num_steps):
    """Returns the tokens of each request; the last request joins late and the first one leaves
    early."""
    tokens = {request.request_id: [] for request in requests}
    blocks = iter(range(3, 64))  # block 0 belongs to nobody: padding must not show in it
    lengths, results = {}, []
    for step in range(num_steps):
        starting = requests[:-1] if step == 0 else requests[-1:] if step == 2 else ()
        scheduled = []
        for name in [*lengths, *(request.request_id for request in starting)]:
            if name == requests[0].request_id and step > 5:
                continue
            request = next(one for one in requests if one.request_id == name)
            start = lengths.get(name, 0)
            count = 1 if name in lengths else len(request.token_ids)
            end = start + count
            needed = -(-end // BLOCK) - -(-start // BLOCK)
            lengths[name] = end
            scheduled.append(
                ScheduledTokens(
                    request_id=name,
                    start=start,
                    num_tokens=count,
                    new_block_ids=tuple(next(blocks) for _ in range(needed)),
                )
            )
        drop = (requests[0].request_id,) if step == 6 else ()
        plan = StepPlan(step_id=step, new=tuple(starting), scheduled=tuple(scheduled), drop=drop)
        results.append(runner.run(plan))
        for name, token in results[-1].sampled.items():
            tokens[name].append(token)
    return tokens, results


REQUESTS = [
    new("a", [3, 4, 5]),
    new("b", [7], logprobs=2, temperature=0.9, seed=5),
    new("c", range(10), repetition_penalty=1.3),
    new("d", [9, 9, 1, 2]),
    new("late", [11, 12], logprobs=0),
]


def test_sizes():
    assert graph_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(13) == (1, 2, 4, 8, 13)


def test_tokens_equal_those_without_graphs():
    recorder = Recorder()
    expected, expected_results = generate(make(), REQUESTS, 9)
    tokens, results = generate(make([1, 2, 4, 8], recorder), REQUESTS, 9)
    assert tokens == expected
    for found, wanted in zip(results, expected_results, strict=True):
        assert not found.errors
        assert found.logprobs.keys() == wanted.logprobs.keys()
        for name, (entry,) in wanted.logprobs.items():
            for token_id, value in entry.items():
                assert found.logprobs[name][0][token_id].logprob == pytest.approx(
                    value.logprob, abs=1e-5
                )
    assert recorder.num_replays == 7  # all but the steps with a prompt


def test_padding_does_not_write_to_the_cache():
    runner = make([8])
    generate(runner, REQUESTS, 9)
    assert not runner._forward._cache.keys[0][:3].any()


def test_the_smallest_frame_that_fits_is_used():
    runner = make([1, 2, 4, 8])
    runner._model._model.num_rows.clear()
    generate(runner, REQUESTS, 9)
    # Prompts; 4 requests; a prompt joins; 5 pad to 8; 4 again.
    assert runner._model._model.num_rows == [18, 4, 6, 8, 8, 8, 4, 4, 4]


def test_a_batch_larger_than_the_largest_frame_runs_without_a_graph():
    runner = make([1, 2])
    assert generate(runner, REQUESTS, 9)[0] == generate(make(), REQUESTS, 9)[0]
    assert runner._model._model.num_rows[-1] == 4


def test_outputs_of_all_sizes_share_their_memory():
    graphs = make([1, 2, 8])._forward._graphs
    places = {recorded.outputs.logits.untyped_storage().data_ptr() for recorded in graphs._recorded}
    assert len(places) == 1


def test_a_step_that_cannot_be_recorded_runs_without_a_graph_and_logs_why(caplog):
    recorder = Recorder(breaks_at=2)
    runner = make([1, 2, 4, 8], recorder)
    assert runner._forward.graph_sizes == ()
    assert recorder.is_recovered
    assert "no CUDA graphs, decoding is slower without: RuntimeError: operation not" in caplog.text
    assert "more" not in caplog.text.partition("operation")[2]
    assert generate(runner, REQUESTS, 9)[0] == generate(make(), REQUESTS, 9)[0]


def test_a_backend_that_cannot_be_recorded_is_named(caplog):
    runner = make([1, 2], backend=ReferenceAttention())
    assert runner._forward.graph_sizes == ()
    assert "the attention backend 'reference' cannot be recorded" in caplog.text


def arrays(num_seqs, num_blocks=2, *, num_tokens=None, in_prompt=False):
    num_tokens = num_tokens or num_seqs
    return StepArrays(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        in_prompt=np.array([in_prompt] * num_tokens),
        query_lens=np.ones(num_seqs, np.int64),
        context_lens=np.ones(num_seqs, np.int64),
        pagings=(
            Paging(np.zeros((num_seqs, num_blocks), np.int32), np.zeros(num_tokens, np.int64)),
        ),
    )


def test_steps_that_need_more_than_a_decode_get_no_frame():
    def frame(num_seqs):
        return DecodeFrame(num_seqs=num_seqs, num_blocks=4, max_context=16, num_axes=0, device=CPU)

    def compute(tensors):
        rows = tensors.token_ids.float()
        return DecodeOutputs(hidden=rows, logits=rows, token_ids=rows, peaks=rows)

    graphs = DecodeGraphs(Recorder())
    graphs.record([1, 4], frame, compute)
    assert graphs.sizes == (1, 4)
    assert graphs.frame_for(arrays(2)).num_seqs == 4
    assert graphs.frame_for(arrays(1)).num_seqs == 1
    assert graphs.frame_for(arrays(5)) is None
    assert graphs.frame_for(arrays(2, num_blocks=5)) is None
    assert graphs.frame_for(arrays(2, num_tokens=3)) is None
    assert graphs.frame_for(arrays(2, in_prompt=True)) is None
