"""Guesses of the next tokens, and when they are tried."""

import random

import pytest

from mmdeploy_llm.engine.schedule.guesses import RETRY_AFTER, Guesser, HeadGuesser
from mmdeploy_llm.engine.schedule.lookup import MAX_DRAFTS, Lookup
from mmdeploy_llm.engine.schedule.pace import Pace
from mmdeploy_llm.engine.schedule.speculation import MAX_SEQS, MIN_RATE
from mmdeploy_llm.engine.schedule.state import RequestState
from mmdeploy_llm.values.plan import UNKNOWN

ROWS = range(1, MAX_DRAFTS + 2)


def proposal(*pieces):
    lookup = Lookup()
    for piece in pieces:
        lookup.extend(piece)
    return list(lookup.proposal())


def paced(seconds_of, num_requests=1):
    """A Pace that has measured steps of every size; seconds_of: rows -> seconds."""
    pace = Pace()
    for _ in range(2):
        for rows in ROWS:
            num_rows = num_requests * rows
            pace.observe(
                seconds_of(num_rows),
                num_requests=num_requests,
                num_rows=num_rows,
                num_tokens=num_rows,
            )
    return pace


class TestLookup:
    def test_new_words_have_no_guess(self):
        assert proposal() == proposal([1]) == proposal([1, 2, 3, 4]) == []

    def test_what_followed_the_last_two_tokens_is_proposed(self):
        assert proposal([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]) == [3, 4, 5, 6, 7, 8, 9]

    def test_pieces_change_nothing(self):
        text = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
        assert (
            proposal(*([token] for token in text)) == proposal(text) == proposal(text[:5], text[5:])
        )

    def test_the_latest_of_equal_matches_wins(self):
        assert proposal([7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2])[0] == 4

    def test_a_longer_match_wins_over_a_later_one(self):
        assert proposal([5, 1, 2, 3, 8, 1, 2, 4, 5, 1, 2])[0] == 3

    def test_a_circle_is_expected_to_go_on(self):
        assert proposal([9, 1, 2, 1, 2]) == [1, 2, 1, 2, 1, 2, 1]
        assert proposal([4, 4, 4]) == [4] * MAX_DRAFTS

    def test_a_copy_goes_on_after_a_word_that_differs(self):
        page = list(range(10, 40))
        lookup = Lookup()
        lookup.extend([*page, *page[:8]])
        assert lookup.proposal()[0] == page[8]
        lookup.extend([99])
        assert list(lookup.proposal()) == page[9 : 9 + MAX_DRAFTS]

    def test_a_copy_goes_on_after_words_that_were_left_out(self):
        page = list(range(10, 60))
        lookup = Lookup()
        lookup.extend([*page, *page[:10]])
        found = []
        for token_id in page[12:18]:
            lookup.extend([token_id])
            found.append(lookup.proposal()[:1] == (token_id + 1,))
        assert found == [False, True, True, True, True, True]

    def test_the_place_of_the_last_proposal_wins_over_equal_ones(self):
        row = [1, 2, 50, 1, 3, 51, 1, 4, 52]  # a one, a column, a value
        lookup = Lookup()
        lookup.extend([9, *row, 9, 1, 2])
        assert lookup.proposal()[0] == 50
        lookup.extend([60])
        assert lookup.proposal()[:2] == (1, 3)

    def test_large_ids_stay_apart(self):
        assert proposal([2**31 - 1, 0, 5, 0, 2**31 - 1]) == []


class TestPace:
    def test_nothing_is_tried_before_plain_steps_are_measured(self):
        assert Pace().best_length(1, [(1.0, 7)]) == 0

    def test_rows_that_cost_nothing_are_all_used(self):
        assert paced(lambda rows: 1.0).best_length(1, [(0.9, 7)]) == MAX_DRAFTS

    def test_rows_that_cost_as_much_as_steps_are_not_used(self):
        assert paced(lambda rows: float(rows)).best_length(1, [(0.9, 7)]) == 0

    @pytest.mark.parametrize(("rate", "length"), [(0.05, 0), (0.6, 2), (0.95, 7)])
    def test_the_length_follows_the_rate(self, rate, length):
        assert paced(lambda rows: 0.8 + 0.2 * rows).best_length(1, [(rate, 7)]) == length

    def test_the_length_is_that_of_the_longest_guess(self):
        pace = paced(lambda rows: 1.0, num_requests=2)
        assert pace.best_length(2, [(0.9, 3), (0.9, 1)]) == 3

    def test_losses_are_bounded(self):
        """Guesses that are always wrong cost a hundredth of the time, and half a step at once, even
        when they are tried as often as the account allows."""
        pace, total, num_steps = Pace(), 0.0, 2000
        for _ in range(num_steps):
            length = pace.best_length(1, [(0.99, 7)])
            seconds = 1.6 if length else 1.0
            total += seconds
            pace._drafted.clear()  # forgets what it costs, so that only the account is left
            pace.observe(seconds, num_requests=1, num_rows=1 + length, num_tokens=1)
        assert num_steps < total < 1.025 * num_steps + 2

    def test_a_hiccup_is_no_loss(self):
        pace = paced(lambda rows: 1.0)
        pace.observe(100.0, num_requests=1, num_rows=8, num_tokens=8)
        assert pace.best_length(1, [(0.9, 7)]) == MAX_DRAFTS

    def test_plain_steps_are_measured_again(self):
        pace = paced(lambda rows: 1.0)
        lengths = []
        for _ in range(140):
            lengths.append(length := pace.best_length(1, [(0.9, 7)]))
            pace.observe(1.0, num_requests=1, num_rows=1 + length, num_tokens=1 + length)
        assert lengths.count(0) == 2


class TestGuesser:
    @pytest.fixture
    def state(self, kit):
        request = kit.make_request("r", [1, 2, 3, 4, 5, 6, 7, 8] * 2, max_tokens=20, eos=(6,))
        return RequestState.of(request, 1, kit.make_config())

    def follow(self, guesser, state, *token_ids):
        state.request.output_token_ids += token_ids
        state.guess(guesser, len(token_ids), 0)

    def test_it_guesses_up_to_a_token_that_ends_the_request(self, state):
        guesser = Guesser()
        self.follow(guesser, state, 1)
        assert guesser.guess == (2, 3, 4, 5)

    def test_it_guesses_no_more_than_the_request_may_have(self, state):
        guesser = Guesser()
        state.next_end = state.request.num_tokens + 3
        self.follow(guesser, state, 1)
        assert guesser.guess == (2,), "a step has one token more than drafts"
        self.follow(guesser, state, 2)
        assert guesser.guess == ()

    def test_the_rate_follows_tokens_that_were_not_drafted(self, state):
        guesser = Guesser()
        self.follow(guesser, state, 1)
        state.max_num_tokens = 500
        for number in range(12):
            self.follow(guesser, state, 100 + number, 1, 2)
        assert guesser.rate < MIN_RATE
        for _ in range(3):
            guesser.guess = (3, 4, 5, 7)
            self.follow(guesser, state, 3, 4, 5, 7)
        assert guesser.rate > MIN_RATE


class TestHeadGuesser:
    @pytest.fixture
    def state(self, kit):
        request = kit.make_request("r", [1, 2, 3], max_tokens=400)
        return RequestState.of(request, 1, kit.make_config(max_model_len=512, num_blocks=99))

    def test_it_leaves_guesses_to_the_runner(self, state):
        guesser = HeadGuesser()
        state.guess(guesser, 1, 0)
        assert guesser.guess == (UNKNOWN,) * MAX_DRAFTS
        state.next_end = state.request.num_tokens + 3
        state.guess(guesser, 1, 0)
        assert guesser.guess == (UNKNOWN,) * 2, "a step has one token more than drafts"

    def test_the_rate_is_that_of_drafts(self, state):
        guesser = HeadGuesser()
        for _ in range(30):
            state.guess(guesser, 3, 4)  # two right, then a wrong one
        assert guesser.rate == pytest.approx(2 / 3, abs=0.01)
        for _ in range(30):
            state.guess(guesser, 5, 4)
        assert guesser.rate > 0.95

    def test_it_is_tried_again_after_a_while(self, state):
        guesser = HeadGuesser()
        for _ in range(8):
            state.guess(guesser, 1, 4)
        assert guesser.rate < MIN_RATE
        for _ in range(RETRY_AFTER):
            assert guesser.rate < MIN_RATE
            state.guess(guesser, 1, 0)
        assert guesser.rate > MIN_RATE


def test_many_requests_do_not_draft(kit):
    prompt = [1, 2, 3, 4] * 4
    for num_seqs in (2, MAX_SEQS + 1):
        config = kit.make_config(
            speculates=True, max_num_seqs=num_seqs, max_num_batched_tokens=512, num_blocks=400
        )
        loop = kit.Loop(config)
        loop.add(*(kit.make_request(f"r{n}", prompt, max_tokens=9) for n in range(num_seqs)))
        loop.step()
        loop.step()
        states = loop.scheduler._requests.running
        assert all((state.guesser is None) == (num_seqs > MAX_SEQS) for state in states)
        loop.run()


@pytest.mark.full
@pytest.mark.parametrize(
    ("row_cost", "rate", "low", "high"),
    [
        (0.0, 1.0, 0.1, 0.3),  # rows are free and guesses right
        (0.03, 0.8, 0.3, 0.6),
        (0.5, 0.8, 0.9, 1.03),  # computing bounds the step
        (0.1, 0.2, 0.7, 1.03),
        (0.03, 0.0, 0.99, 1.03),  # all guesses are wrong
    ],
)
def test_a_run_is_faster_or_as_fast(kit, monkeypatch, row_cost, rate, low, high):
    """On a clock of its own: a step costs a second, and row_cost for each further row. rate: of
    right guesses."""
    rng, known = random.Random(0), {}

    def follow(self, request, *, num_new, num_drafts, num_left, stop_ids):
        name, output = request.request_id, request.output_token_ids
        known[name] = known.get(name) or kit.expected_tokens(request, 108)
        coming = known[name][len(output) :][:MAX_DRAFTS]
        num_right = next((at for at in range(MAX_DRAFTS) if rng.random() >= rate), MAX_DRAFTS)
        self._rate._num_right, self._rate._num_tried = rate, 1.0
        guess = [token if at < num_right else 999 for at, token in enumerate(coming)]
        self.guess = tuple(guess[:num_left])

    monkeypatch.setattr(Guesser, "follow", follow)
    totals = []
    for speculates in (False, True):
        loop = kit.Loop(kit.make_config(speculates=speculates, max_model_len=128, num_blocks=99))
        loop.cost = lambda plan: 1 + row_cost * (plan.num_tokens - 1)
        for number in range(6):
            loop.add(kit.make_request(f"r{number}", [number, 2], max_tokens=100))
            loop.run()
        totals.append(loop.seconds)
    assert low < totals[1] / totals[0] < high
