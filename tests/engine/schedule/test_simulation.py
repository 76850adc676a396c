"""Thousands of steps of seeded traffic: every plan is checked, every token must be exact."""

import random
import zlib

import pytest

from mmdeploy_llm.engine.schedule.pace import Pace
from mmdeploy_llm.engine.schedule.speculation import Guesser
from mmdeploy_llm.request import RequestStatus
from mmdeploy_llm.values.adapter_ref import AdapterRef
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.pooling_request import PoolingRequest

SCENES = {
    "roomy": {"num_blocks": 200, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "tiny pool": {"num_blocks": 17, "max_num_seqs": 6},
    "few idle blocks": {"num_blocks": 17, "max_idle_blocks": 3},
    "tiny pool, no prefix cache": {"num_blocks": 17, "enable_prefix_caching": False},
    "tiny encoder cache": {"encoder_cache_tokens": 9, "num_blocks": 40},
    "one token blocks": {"block_size": 1, "num_blocks": 64},
    "small steps": {"max_num_batched_tokens": 5, "num_blocks": 24},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
    "whole prompts, tiny pool": {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 64,
        "num_blocks": 16,
        "encoder_cache_tokens": 18,
    },
    "atomic media": {"atomic_media": True, "num_blocks": 20, "encoder_cache_tokens": 10},
    "atomic media, small steps": {"atomic_media": True, "max_num_batched_tokens": 9},
    "one at a time": {"max_num_seqs": 1, "num_blocks": 16},
    "large blocks": {"block_size": 16, "num_blocks": 8},
    "states": {"num_state_rows": 20, "max_idle_states": 10},
    "states, tiny pool": {"num_blocks": 17, "num_state_rows": 14, "max_idle_states": 4},
    "states, few idle": {"num_state_rows": 11, "max_idle_states": 1, "num_blocks": 64},
    "states, no prefix cache": {"num_state_rows": 10, "enable_prefix_caching": False},
    "states, whole prompts": {
        "num_state_rows": 20,
        "max_idle_states": 10,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 64,
    },
    "states, atomic media": {
        "num_state_rows": 20,
        "max_idle_states": 10,
        "atomic_media": True,
        "num_blocks": 20,
        "encoder_cache_tokens": 10,
    },
    "drafts": {"speculates": True, "num_blocks": 200, "max_num_batched_tokens": 64},
    "drafts, tiny pool": {"speculates": True, "num_blocks": 17, "max_num_seqs": 6},
    "drafts, one token blocks": {"speculates": True, "block_size": 1, "num_blocks": 64},
    "drafts, small steps": {"speculates": True, "max_num_batched_tokens": 5, "num_blocks": 24},
    "drafts, whole prompts": {
        "speculates": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 64,
    },
    "drafts, states": {"speculates": True, "num_state_rows": 20, "max_idle_states": 10},
    "drafts, states, tiny pool": {
        "speculates": True,
        "num_blocks": 17,
        "num_state_rows": 14,
        "max_idle_states": 4,
    },
    "windows": {"window": 6, "num_window_blocks": 40},
    "windows, the smallest pool": {"window": 6, "num_window_blocks": 8},
    "windows, tiny pools": {"window": 6, "num_window_blocks": 8, "num_blocks": 17},
    "windows, few idle": {"window": 9, "num_window_blocks": 30, "max_idle_window_blocks": 4},
    "windows of one token": {"window": 1, "num_window_blocks": 12},
    "windows, one token blocks": {
        "window": 5,
        "num_window_blocks": 30,
        "block_size": 1,
        "num_blocks": 64,
    },
    "windows longer than prompts": {"window": 60, "num_window_blocks": 64},
    "windows, no prefix cache": {
        "window": 6,
        "num_window_blocks": 12,
        "enable_prefix_caching": False,
    },
    "windows, whole prompts": {
        "window": 6,
        "num_window_blocks": 16,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 64,
    },
    "windows, atomic media": {
        "window": 6,
        "num_window_blocks": 20,
        "atomic_media": True,
        "num_blocks": 20,
        "encoder_cache_tokens": 10,
    },
    "windows, states": {
        "window": 6,
        "num_window_blocks": 20,
        "num_state_rows": 20,
        "max_idle_states": 10,
    },
    "windows, drafts": {
        "window": 6,
        "num_window_blocks": 24,
        "speculates": True,
        "num_blocks": 200,
        "max_num_batched_tokens": 64,
    },
    "windows, drafts, states": {
        "window": 6,
        "num_window_blocks": 16,
        "speculates": True,
        "num_state_rows": 20,
        "max_idle_states": 10,
    },
}
# All media stand outside of the prompts.
OUTSIDE = {
    "outside": {"num_blocks": 200, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "outside, tiny encoder cache": {"encoder_cache_tokens": 13, "num_blocks": 40},
    "outside, tiny pool": {"num_blocks": 17, "encoder_cache_tokens": 24},
    "outside, whole prompts": {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 64,
        "encoder_cache_tokens": 18,
    },
    "outside, drafts": {"speculates": True, "encoder_cache_tokens": 30},
}
SCENES |= OUTSIDE
# Five adapters, of 10 to 14 bytes.
ADAPTED = {
    "adapters": {"max_adapters": 2, "num_blocks": 200, "max_num_seqs": 8},
    "adapters, one at a time": {"max_adapters": 1, "num_blocks": 40},
    "adapters, few bytes": {"max_adapters": 5, "adapter_bytes": 36, "num_blocks": 40},
    "adapters, tiny pool": {"max_adapters": 3, "num_blocks": 17, "max_num_seqs": 6},
    "adapters, drafts, states": {
        "max_adapters": 2,
        "speculates": True,
        "num_state_rows": 20,
        "max_idle_states": 10,
    },
}
SCENES |= ADAPTED
SCENES |= {
    f"{scene}, growing long": {**SCENES[scene], "long_after": long_after}
    for scene, long_after in (
        ("roomy", 30),
        ("tiny pool", 32),
        ("one token blocks", 27),
        ("states, tiny pool", 31),
        ("drafts", 32),
        ("drafts, states", 29),
        ("windows, drafts", 33),
    )
}
# One of each kind; the others are full tests.
FIRST = (
    "roomy",
    "tiny pool",
    "atomic media",
    "states, atomic media",
    "windows, atomic media",
    "outside, tiny encoder cache",
    "roomy, growing long",
    "adapters, tiny pool",
)
NUM_REQUESTS = 250  # of the quick scenes; 40 % in the others, which differ less
EOS = (7,)
WRONG = 999  # no token of the fake model


def stops(request, tokens):
    """Imitates a stop string: an end that only delivery can detect, from the text."""
    return (sum(tokens) + len(tokens)) % 89 == 0


class Traffic:
    """Random requests: shared prefixes, shared media, late arrivals, some that can never run."""

    def __init__(self, kit, seed, is_outside=False, has_adapters=False):
        self.kit, self.is_outside, self.has_adapters = kit, is_outside, has_adapters
        self.rng, self.urgency = random.Random(seed), random.Random(seed + 2)
        self.sharing, self.wishes = random.Random(seed + 3), random.Random(seed + 4)
        self.prefixes = [[100 * n + i for i in range(24)] for n in range(1, 4)]
        self.adapting = random.Random(seed + 5)
        self.arrival = 0.0

    def request(self, number, now):
        rng, urgency = self.rng, self.urgency
        prompt = list(rng.choice(self.prefixes)[: rng.randrange(0, 25)])
        prompt += [rng.randrange(20) for _ in range(rng.randrange(1, 20))]
        media = []
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            key = rng.randrange(6)
            size = 3 + key  # 3 to 8 tokens
            if self.is_outside:
                if len(media) < 2:
                    media.append((0, f"image-{key}", size, ()))
                continue
            if len(prompt) + size < 50:
                # Text of one token within some images, always the same, like their content.
                rows = [row + (key % 2 and row >= size // 2) for row in range(size)]
                media.append((len(prompt), f"image-{key}", size, tuple(rows)))
                prompt += [0] * (rows[-1] + 1) + [1] * rng.randrange(3)
        if rng.random() < 0.04:
            prompt += [5] * 80  # longer than any limit
        if rng.random() < 0.5:
            self.arrival += 1.0
        return self.kit.make_request(
            f"r{number}",
            prompt,
            media=media,
            eos=EOS,
            max_tokens=rng.randrange(1, 40),
            min_tokens=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([(), (3,)]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
            arrival_time=self.arrival + rng.choice([0, 0, 0, 5]),
            priority=urgency.choice([0, 0, 0, -1, 2]),
            deadline=self.deadline(now) if urgency.random() < 0.2 else None,
            is_shared=self.sharing.random() < 0.5,
            wanted=self.wanted(len(prompt)) if self.wishes.random() < 0.15 else None,
            adapter=self.adapter() if self.has_adapters else None,
        )

    def adapter(self):
        number = self.adapting.choice([0, 0, 0, 1, 1, 2, 3, 4, 5])
        if not number:
            return None
        name = f"adapter-{number}"
        return AdapterRef(name=name, folder="", key=name, num_bytes=9 + number)

    def wanted(self, num_tokens):
        what = self.wishes.choice(["vector", "score", "token_vectors", "likelihood"])
        pooling = self.wishes.choice(["last", "cls", "mean"])
        skipped = self.wishes.randrange(1, num_tokens) if num_tokens > 1 else 0
        if what == "likelihood" and not skipped:
            what = "vector"
        return PoolingRequest(what=what, pooling=pooling, num_skipped=skipped)

    def deadline(self, now):
        seconds = self.urgency.choice([3, 10, 30, 300])
        return Deadline(seconds=seconds, end=now + seconds)


def simulate(kit, config, seed, num_requests=NUM_REQUESTS, *, is_outside=False, has_adapters=False):
    """Runs the traffic to its end, with aborts, failures and broken steps."""
    traffic, rng = Traffic(kit, seed, is_outside, has_adapters), random.Random(seed + 1)
    loop = kit.Loop(config, stops)
    requests = []
    while len(requests) < num_requests or loop.scheduler.has_work:
        while len(requests) < num_requests and rng.random() < 0.4:
            requests.append(loop.add(traffic.request(len(requests), loop.now)))
        alive = [r.request_id for r in requests if r.request_id not in loop.ended]
        aborts = rng.sample(alive, 1) if alive and rng.random() < 0.02 else ()
        failing = {id_ for id_ in alive if rng.random() < 0.001}
        breaks = rng.choice(["before", "after"]) if rng.random() < 0.005 else None
        if has_adapters and traffic.adapting.random() < 0.02:
            loop.scheduler.drop_adapter("adapter-1")
        loop.step(aborts, failing, breaks)
        assert len(loop.plans) < 20000, "the traffic never ends"
    loop.step()  # drops the last requests
    return loop, requests


def expected_end(kit, request, config):
    """Returns tokens and finish reason of a run without limits and without other requests."""
    if request.wanted is not None:
        return [], "stop"
    params = request.params
    limit = min(params.max_tokens, config.max_model_len - len(request.prompt_token_ids))
    tokens = kit.expected_tokens(request, limit, config.long_after)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
    for count in range(1, limit + 1):
        if tokens[count - 1] in stop_ids and count >= params.min_tokens:
            return tokens[:count], "stop"
        if count == limit:
            return tokens, "length"
        if stops(request, tokens[:count]):
            return tokens[:count], "stop"
    raise AssertionError("unreachable")


def guess_with_mistakes(kit, config, monkeypatch):
    """Replaces every guess by the tokens that will come, with one wrong token in some."""
    rng, known = random.Random(0), {}

    def follow(self, request, *, num_new, num_drafts, num_left, stop_ids):
        if request.request_id not in known:
            known[request.request_id] = kit.expected_tokens(request, 64, config.long_after)
        before = len(request.output_token_ids)
        guess = known[request.request_id][before : before + rng.randrange(8)]
        if guess and rng.random() < 0.6:
            guess[rng.randrange(len(guess))] = WRONG
        self.guess = tuple(guess[:num_left])

    monkeypatch.setattr(Guesser, "follow", follow)
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 7)


@pytest.mark.few_in_ci(16)
@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "scene",
    [pytest.param(scene, marks=[pytest.mark.full] * (scene not in FIRST)) for scene in SCENES],
)
def test_traffic_is_exact_and_leaves_nothing_behind(kit, scene, monkeypatch):
    config = kit.make_config(**SCENES[scene])
    guess_with_mistakes(kit, config, monkeypatch)
    num_requests = NUM_REQUESTS if scene in FIRST else 100
    seed = zlib.crc32(scene.encode())
    kinds = {"is_outside": scene in OUTSIDE, "has_adapters": scene in ADAPTED}
    loop, requests = simulate(kit, config, seed, num_requests, **kinds)
    assert set(loop.ended) == {request.request_id for request in requests}
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert loop.scheduler.stats().num_free_blocks == config.num_blocks
    assert not loop.executor.slots
    num_normal = 0
    for request in requests:
        reason, tokens = loop.reasons[request.request_id], loop.tokens[request.request_id]
        if not config.speculates:  # a step may have sampled tokens after a stop
            assert request.finish_reason == reason
            assert request.output_token_ids == tokens
        assert request.output_token_ids[: len(tokens)] == tokens
        if reason in ("stop", "length"):
            num_normal += 1
            assert (tokens, reason) == expected_end(kit, request, config)
            check_prompt_logprobs(loop, request)
            check_vector(kit, loop, request, config)
        else:
            assert tokens == kit.expected_tokens(request, len(tokens), config.long_after)
            assert loop.ended[request.request_id].failure is not None
    assert num_normal > 0.4 * num_requests
    counts = loop.executor.num_drafts, loop.executor.num_accepted
    if "small" not in scene:
        assert (counts[0] > counts[1] + 40 > 120) == config.speculates
    assert loop.scheduler.stats().num_accepted_drafts <= counts[1]


def check_vector(kit, loop, request, config):
    assert (request.wanted is not None) == (request.request_id in loop.vectors)
    if request.wanted is not None:
        expected = kit.expected_states(request, config.long_after)
        assert loop.vectors[request.request_id] == expected


def check_prompt_logprobs(loop, request):
    wanted = request.params.prompt_logprobs is not None and request.wanted is None
    positions = list(range(len(request.prompt_token_ids))) if wanted else []
    assert loop.prompt_logprobs[request.request_id] == positions


@pytest.mark.full
def test_every_scene_reaches_its_purpose(kit):
    """Without preemptions, prefix hits and evictions the exactness above would prove little."""
    tiny, requests = simulate(kit, kit.make_config(**SCENES["tiny pool"]), seed=1)
    num_preemptions = sum(request.num_preemptions for request in requests)
    assert num_preemptions == tiny.scheduler.stats().num_preemptions > 20
    assert sum(request.num_cached_tokens > 0 for request in requests) > 10
    assert any(len(plan.scheduled) and len(plan.new) for plan in tiny.plans)
    encoder, _ = simulate(kit, kit.make_config(**SCENES["tiny encoder cache"]), seed=2)
    assert sum(len(plan.forget) for plan in encoder.plans) > 20
    config = kit.make_config(**SCENES["adapters"])
    adapted, _ = simulate(kit, config, seed=4, has_adapters=True)
    assert sum(len(plan.unload) for plan in adapted.plans) > 20
    assert max(len({new.adapter for new in plan.new}) for plan in adapted.plans) > 1
    roomy, requests = simulate(kit, kit.make_config(**SCENES["roomy"]), seed=3)
    assert max(len(plan.scheduled) for plan in roomy.plans) > 4
    reasons = {roomy.reasons[request.request_id] for request in requests}
    assert reasons == {"stop", "length", "error", "abort"}
    ended = [update.failure for loop in (tiny, encoder, roomy) for update in loop.ended.values()]
    late = [failure.message for failure in ended if failure is not None and failure.code == 408]
    for state in ("it waited to start", "it had generated", "prompt tokens were computed"):
        assert any(state in message for message in late), state
