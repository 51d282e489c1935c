"""What an evaluation says of problems with a patch, by hand."""

import json
from dataclasses import replace

import pytest

from psrl.runtime.swe_results import SweResults
from psrl.types import (
    Episode,
    EpisodeTicket,
    EpisodeUid,
    GroupUid,
    LoopResult,
    Outcome,
    PolicyVersion,
    Score,
    Submission,
    SweProblem,
    Task,
    TaskUid,
    Timings,
)


def episode(name, *, repo="a", resolved=False, outcome=Outcome.FINISHED, temperature=None, patch="diff", with_problem=True, calls=3.0):
    problem = SweProblem(
        instance_id=name, repo=repo, task_kind="swe", statement="s", gold_patch="g", test_paths=("t",), fail_to_pass=("f",)
    )
    extra_info = {"swe": problem.to_row()} if with_problem else {}
    submission = Submission(exit_status="Submitted", patch=patch) if patch is not None else None
    judged = outcome.judges_policy
    ids = {"uid": EpisodeUid(f"{name}-e"), "group": GroupUid(name), "admitted_version": PolicyVersion(0)}
    return Episode(
        ticket=EpisodeTicket(**ids, seed=1, is_validation=True, temperature=temperature),
        task=Task(uid=TaskUid(f"uid-{name}"), prompt=(), data_source="mine", extra_info=extra_info),
        result=LoopResult(
            outcome=outcome, trajectories=(), messages=(), turn_texts=(), counts={"agent/calls": calls}, submission=submission, error="why"
        ),
        score=Score(reward=float(resolved) if judged else None, accuracy=float(resolved) if judged else None),
        timings=Timings(total_s=10.0),
    )


def test_rates_outcomes_and_repositories_are_counted_over_all_problems(tmp_path):
    results = SweResults(tmp_path, model_name="m")
    for each in (
        episode("a-1", resolved=True),
        episode("a-2", outcome=Outcome.MAX_TURNS),
        episode("b-1", repo="b", resolved=True),
        episode("a-3", outcome=Outcome.INFRA_ERROR, patch=None),
    ):
        results.add(each)
    summary = results.summary()
    assert (summary.num_resolved, summary.num_problems, summary.resolve_rate) == (2, 4, 0.5)
    # Wilson at 2 of 4: 0.5 ± 1.96 sqrt(0.0625 + 0.2401) / 1.9604, that is 0.5 ± 0.35.
    assert (summary.low, summary.high) == pytest.approx((0.150, 0.850), abs=5e-4)
    assert summary.outcomes == {"finished": 2, "max_turns": 1, "infra_error": 1}
    assert summary.exit_statuses == {"Submitted": 3, "none": 1}
    assert list(summary.by_repo.items()) == [("a", (1, 3)), ("b", (1, 1))]
    assert (summary.mean_turns, summary.num_sampled, summary.mean_episode_s) == (3.0, None, 10.0)


def test_of_several_episodes_the_greedy_one_counts_and_else_the_first(tmp_path):
    results = SweResults(tmp_path, model_name="m")
    for each in (
        episode("one", patch="first", resolved=True),
        episode("one", patch="second"),
        episode("two", patch="sampled"),
        episode("two", patch="greedy", temperature=0.0, resolved=True),
        episode("two", patch="late"),
    ):
        results.add(each)
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    assert {name: entry["model_patch"] for name, entry in predictions.items()} == {"one": "first", "two": "greedy"}
    assert results.num_resolved == 2


def test_a_patch_of_any_task_is_a_prediction_and_tasks_without_patches_say_nothing(tmp_path):
    results = SweResults(tmp_path, model_name="m")
    results.add(episode("plain", with_problem=False, patch=None))
    assert results.summary() is None
    assert list(tmp_path.iterdir()) == []
    results.add(episode("other", with_problem=False, patch="p"))
    assert json.loads((tmp_path / "predictions.json").read_text()) == {
        "uid-other": {"instance_id": "uid-other", "model_name_or_path": "m", "model_patch": "p"}
    }


def test_what_is_no_text_in_a_patch_does_not_break_the_file(tmp_path):
    results = SweResults(tmp_path, model_name="m")
    results.add(replace(episode("odd"), result=replace(episode("odd").result, submission=Submission(exit_status="", patch="ä\ud800\x00"))))
    with open(tmp_path / "predictions.json") as file:
        assert json.load(file)["odd"]["model_patch"] == "ä\ud800\x00"
