"""What the scripted engine adds to the contract: answers that a script chooses, the same for the same prompt."""

import json
import queue

import pytest

from psrl.engines.contract import PauseMode, TurnRequest
from psrl.engines.scripted.core import ScriptedCore
from psrl.engines.scripted.script import ScriptedTurn, read_script
from psrl.errors import EngineError
from psrl.types import FinishReason, SamplingParams
from psrl.types.latency import Latency

WAIT_S = 30
FUZZ = {"random": {"low": 10, "high": 500, "min_tokens": 2, "max_tokens": 30, "last_ids": [2, 3]}}


@pytest.fixture
def core_of(tmp_path):
    cores = []

    def make(*turns, max_num_seqs=64, **script):
        (tmp_path / "script.json").write_text(json.dumps({"turns": list(turns), **script}))
        cores.append(ScriptedCore(read_script(tmp_path / "script.json"), max_num_seqs=max_num_seqs))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def submit(core, prompt, *, request_id="r", priority=0, on_done=None, **sampling):
    box = queue.Queue()
    params = SamplingParams(**{"max_tokens": 64} | sampling)
    request = TurnRequest(request_id=request_id, token_ids=list(prompt), sampling=params, priority=priority)
    core.submit(request, on_done or box.put)
    return box


def answer(core, prompt, **sampling):
    return submit(core, prompt, **sampling).get(timeout=WAIT_S)


def test_random_ids_depend_on_the_prompt_alone_and_differ_between_prompts(core_of):
    turn = FUZZ | {"finish_reason": "stop"}
    first, second = core_of(turn), core_of(turn)
    prompts = [[n, n + 1] for n in range(200)]
    answers = [answer(first, prompt) for prompt in prompts]
    assert [answer(second, prompt) for prompt in reversed(prompts)] == answers[::-1]
    assert len({tuple(one.token_ids) for one in answers}) == 200
    for one in answers:
        *drawn, last = one.token_ids
        assert 2 <= len(drawn) <= 30
        assert all(10 <= token < 500 for token in drawn)
        assert last in (2, 3)
        assert one.finish_reason is FinishReason.STOP
        assert len(set(one.logprobs)) == len(one.logprobs) == len(one.token_ids)
        assert all(-8 <= logprob <= 0 for logprob in one.logprobs)


def test_the_cache_counts_what_running_turns_hold(core_of):
    core = core_of({"token_ids": [5], "per_token_s": 60.0}, max_num_seqs=4, max_model_len=100)
    box = submit(core, range(1, 41))
    assert core.load().cache_usage == (40 + 1) / (4 * 100)  # its second token comes in a minute
    core.abort(None).result(WAIT_S)
    box.get(timeout=WAIT_S)
    assert core.load().cache_usage == 0


def test_another_seed_draws_other_ids(core_of):
    turns = [FUZZ | {"random": FUZZ["random"] | {"seed": seed}, "finish_reason": "stop"} for seed in (1, 2)]
    assert answer(core_of(turns[0]), [1, 2]).token_ids != answer(core_of(turns[1]), [1, 2]).token_ids


def test_the_prompt_chooses_the_turn_whatever_the_order_of_requests(core_of):
    turns = [{"token_ids": [n], "finish_reason": "stop"} for n in range(10, 15)]
    first, second = core_of(*turns, by_prompt=True), core_of(*turns, by_prompt=True)
    prompts = [[n] for n in range(50)]
    chosen = [answer(first, prompt).token_ids for prompt in prompts]
    assert [answer(second, prompt).token_ids for prompt in reversed(prompts)] == chosen[::-1]
    assert {ids[0] for ids in chosen} == {10, 11, 12, 13, 14}


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_turn_ends_after_its_last_id_with_the_reason_of_the_script(core_of, reason):
    turn = answer(core_of({"token_ids": [7, 8, 9], "finish_reason": reason.value}), [1])
    assert (turn.token_ids, turn.finish_reason) == ([7, 8, 9], reason)


def test_max_tokens_and_stop_ids_cut_a_turn_before_its_own_end(core_of):
    core = core_of({"token_ids": [7, 8, 9], "finish_reason": "abort"})
    cut, stopped = answer(core, [1], max_tokens=2), answer(core, [1], stop_token_ids=(8,))
    assert (cut.token_ids, cut.finish_reason) == ([7, 8], FinishReason.LENGTH)
    assert (stopped.token_ids, stopped.finish_reason) == ([7, 8], FinishReason.STOP)


def test_versions_rise_inside_a_turn_where_the_script_says(core_of):
    turn = answer(core_of({"token_ids": [5, 6], "new_version_at": [1, 4]}), [1], max_tokens=6)
    assert turn.token_ids == [5, 6, 5, 6, 5, 6]
    assert turn.versions == [0, 1, 1, 1, 2, 2]


def test_a_condition_needs_all_of_its_ids_in_a_row(core_of):
    core = core_of({"when_prompt_contains": [7, 7, 8], "token_ids": [1]}, {"token_ids": [2]})
    prompts = ([7, 7, 7, 8], [7, 8, 7, 7], [7, 7, 8], [8])
    assert [answer(core, prompt, max_tokens=1).token_ids for prompt in prompts] == [[1], [2], [1], [2]]


def test_a_turn_that_takes_time_keeps_its_pace_beside_those_that_do_not(core_of):
    core = core_of({"when_prompt_contains": [9], "token_ids": [1], "per_token_s": 0.001}, {"token_ids": [2]})
    slow = [submit(core, [9], max_tokens=20) for _ in range(30)]
    assert answer(core, [1], max_tokens=3).token_ids == [2, 2, 2]
    assert [one.get(timeout=WAIT_S).token_ids for one in slow] == [[1] * 20] * 30


def test_a_pause_that_keeps_ends_one_that_waits(core_of):
    core = core_of({"token_ids": [1], "per_token_s": 0.001})
    running = submit(core, [1], max_tokens=10**6)
    waiting = core.pause(PauseMode.WAIT, clear_cache=False)
    assert not waiting.done()
    core.pause(PauseMode.KEEP, clear_cache=False).result(WAIT_S)
    waiting.result(WAIT_S)
    stood_at = core.load().num_sampled_tokens
    assert core.abort(None).result(WAIT_S) == 1
    assert len(running.get(timeout=WAIT_S).token_ids) == stood_at


def test_closing_fails_what_runs_waits_or_comes_later(core_of):
    core = core_of({"failure": "hang"})
    running = submit(core, [1])
    core.pause(PauseMode.KEEP, clear_cache=False).result(WAIT_S)
    queued = submit(core, [1])
    core.close()
    assert [box.get(timeout=WAIT_S).value for box in (running, queued, submit(core, [1]))] == ["error"] * 3


def test_as_many_turns_run_as_there_are_slots_and_the_others_follow_by_priority(core_of):
    core = core_of({"when_prompt_contains": [9], "failure": "hang"}, {"token_ids": [1], "finish_reason": "stop"}, max_num_seqs=2)
    ended = []
    for name in ("a", "b"):
        submit(core, [9], request_id=name)
    for name, priority in (("late", 5), ("first", -1), ("second", 0), ("third", 0)):
        submit(core, [1], request_id=name, priority=priority, on_done=lambda _, name=name: ended.append(name))
    hanging = submit(core, [9], request_id="c", priority=9)
    load = core.load()
    assert (load.num_running, load.num_waiting, ended) == (2, 5, [])
    assert core.abort(["a"]).result(WAIT_S) == 1  # one slot: the four pass through it, then the last takes it
    load = core.load()
    assert ended == ["first", "second", "third", "late"]
    assert (load.num_running, load.num_waiting) == (2, 0)
    core.abort(None).result(WAIT_S)
    assert hanging.get(timeout=WAIT_S).finish_reason is FinishReason.ABORT


def test_a_pause_fills_no_slot_and_resume_does(core_of):
    core = core_of({"token_ids": [1], "finish_reason": "stop"}, max_num_seqs=1)
    core.pause(PauseMode.KEEP, clear_cache=False).result(WAIT_S)
    boxes = [submit(core, [n]) for n in range(500)]
    assert core.load().num_waiting == 500
    core.resume().result(WAIT_S)
    assert [box.get(timeout=WAIT_S).token_ids for box in boxes] == [[1]] * 500


LONG_TAILED = {
    "random": {"low": 10, "high": 500, "num_tokens": "pareto:min=3,alpha=1.2,max=200", "last_ids": [2], "by_seed": True},
    "finish_reason": "stop",
}


def test_lengths_follow_their_distribution_and_depend_on_seed_and_prompt_alone(core_of):
    first, second = core_of(LONG_TAILED), core_of(LONG_TAILED)
    asked = [([n % 7], seed) for n in range(20) for seed in range(20)]
    answers = [answer(first, prompt, seed=seed, max_tokens=1000) for prompt, seed in asked]
    assert [answer(second, prompt, seed=seed, max_tokens=1000) for prompt, seed in reversed(asked)] == answers[::-1]
    lengths = [len(one.token_ids) - 1 for one in answers]
    assert min(lengths) == 3
    assert max(lengths) <= 200
    # P(more than 6) = (3 / 6.5) ** 1.2 = 0.395 of 140 different answers (7 prompts, 20 seeds), within five standard deviations.
    different = {tuple(one.token_ids) for one in answers}
    assert len(different) == 140
    assert abs(sum(len(ids) - 1 > 6 for ids in different) - 55) < 29


def test_seconds_of_a_turn_depend_on_seed_and_prompt_alone():
    turn = ScriptedTurn(
        token_ids=(1,),
        latency_s=Latency.lognormal(median=0.1, sigma=1),
        per_token_s=Latency.parse("pareto:min=0.01,alpha=2", key="k"),
    )
    asked = [([n], seed) for n in range(5) for seed in range(5)]
    drawn = [turn.answer_to(prompt, seed) for prompt, seed in asked]
    assert [turn.answer_to(prompt, seed) for prompt, seed in reversed(asked)] == drawn[::-1]
    assert len({one.latency_s for one in drawn}) == len({one.per_token_s for one in drawn}) == 25


@pytest.mark.parametrize("turn", [LONG_TAILED, {"token_ids": [7, 8, 9]}, {"token_ids": [7, 8, 9, 5], "finish_reason": "stop"}], ids=str)
def test_a_turn_that_was_given_back_goes_on_where_it_was(core_of, turn):
    core = core_of(turn, turn_header=[3, 4])
    prompt = [50, 3, 4, 60, 61, 3, 4]
    for seed in range(10):
        whole = answer(core, prompt, seed=seed, max_tokens=100)
        for cut in range(1, min(len(whole.token_ids), 9)):
            begun = whole.token_ids[:cut]
            rest = answer(core, [*prompt, *begun], seed=seed, max_tokens=100 - cut)
            assert begun + rest.token_ids == whole.token_ids
            assert whole.logprobs[cut:] == rest.logprobs
            assert rest.finish_reason == whole.finish_reason


def test_a_prompt_that_goes_on_with_something_else_is_a_prompt_of_its_own(core_of):
    core = core_of({"token_ids": [7, 8, 9], "finish_reason": "stop"}, turn_header=[3, 4])
    assert answer(core, [3, 4, 7, 9]).token_ids == answer(core, [3, 4, 7, 8, 9]).token_ids == [7, 8, 9]


@pytest.mark.parametrize(
    ("turn", "cause"),
    [
        ({"token_ids": [1], "latency_s": "gamma:a=1"}, "latency_s=.*no latency"),
        ({"token_ids": [1], "per_token_s": -1}, "per_token_s=.*no latency"),
        ({"random": {"low": 5, "high": 9, "num_tokens": "x"}}, "num_tokens=.*no latency"),
        ({}, "needs token_ids, random or a failure"),
        ({"token_ids": [1], **FUZZ}, "either token_ids or random"),
        ({"random": {"low": 5, "high": 5, "max_tokens": 3}}, "low < high"),
        ({"random": {"low": 5, "high": 6, "max_tokens": 3, "what": 1}}, "what"),
        ({"token_ids": [1], "finish_reason": "done"}, "done"),
        ({"token_ids": [1], "new_version_at": [3, 1]}, "ascend"),
        ({"token_idz": [1]}, "token_idz"),
    ],
)
def test_a_script_that_means_nothing_is_refused_with_its_cause(core_of, turn, cause):
    with pytest.raises(EngineError, match=cause):
        core_of(turn)
