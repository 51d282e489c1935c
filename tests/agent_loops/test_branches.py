"""Branches of a session on their way to training: which tokens carry the reward, and how the run folder shows them."""

import asyncio

from episode_kit import LastTurnScorer, ScriptedGenerator, ids_of, make_rollout, make_task, make_ticket, renderer
from test_session_episodes import ask

from psrl.agent_loops import EpisodeRunner, LoopParts, SessionAgentLoop
from psrl.agent_loops.branches import trained_branches
from psrl.data_plane import rows_of
from psrl.telemetry.trajectories import TRAIN_FILE, TrajectoryWriter, read_trajectories
from psrl.types import EpisodeUid, Outcome, SessionId, SessionRecord, Step, Trajectory, TrajectoryUid
from tests.gateway.gateway_kit import running_gateway

SAID = ["first", "second", "rewritten", "The answer is 7"]


class Forgetful(SessionAgentLoop):
    """Two turns, then its second question asked otherwise, and one turn more."""

    async def run_agent(self, task, address):
        first = await ask(address, "hi")
        await ask(address, "hi", first, "go on")
        third = await ask(address, "hi", first, "go on, but otherwise")
        await ask(address, "hi", first, "go on, but otherwise", third, "and?")


def play(branch_reward):
    async def run():
        generator = ScriptedGenerator(SAID)
        async with running_gateway(renderer(), generator) as sessions:
            rollout = make_rollout(loop=f"{__name__}.Forgetful", agent={"branch_reward": branch_reward})
            parts = LoopParts(renderer=renderer(), generator=generator, rollout=rollout, sessions=sessions)
            return await EpisodeRunner(parts, LastTurnScorer()).run(make_task(), make_ticket()), generator.requests

    return asyncio.run(asyncio.wait_for(run(), timeout=60))


def sampled_of(trajectory):
    return [step.sampled_ids for step in trajectory.steps]


def test_every_branch_carries_the_reward_and_each_sampled_token_is_trained_on_once():
    episode, requests = play("shared")
    assert episode.result.outcome is Outcome.FINISHED
    abandoned, last = episode.result.trajectories
    assert [abandoned.uid, last.uid] == ["train-0-0-e0-t0", "train-0-0-e0-t1"]
    assert sampled_of(abandoned) == [ids_of("first"), ids_of("second")]
    assert sampled_of(last) == [ids_of("rewritten"), ids_of("The answer is 7")]
    assert last.ids() == requests[3].token_ids + ids_of("The answer is 7")
    rows = rows_of(episode)
    assert [(row.key, row.tags["reward"], row.tags["episode"]) for row in rows] == [
        ("train-0-0-e0-t0", 1.0, "train-0-0-e0"),
        ("train-0-0-e0-t1", 1.0, "train-0-0-e0"),
    ]
    assert sum(int(row.columns["loss_mask"].sum()) for row in rows) == sum(len(ids_of(text)) for text in SAID)


def test_with_last_only_the_branch_of_the_last_turn_is_trained_on_but_all_of_it():
    episode, requests = play("last")
    (last,) = episode.result.trajectories
    assert last.uid == "train-0-0-e0-t1"
    assert sampled_of(last) == [ids_of("first"), ids_of("rewritten"), ids_of("The answer is 7")]
    assert last.ids() == requests[3].token_ids + ids_of("The answer is 7")
    assert last.steps[0].observation_ids == requests[0].token_ids
    assert [row.key for row in rows_of(episode)] == ["train-0-0-e0-t1"]
    assert episode.result.counts["turns"] == 4


def test_the_run_folder_keeps_every_branch(tmp_path):
    episode, _ = play("shared")
    writer = TrajectoryWriter(tmp_path)
    writer.write(episode, step=1)
    writer.close()
    (record,) = read_trajectories(tmp_path / TRAIN_FILE)
    for read, kept in zip(record.episode.result.trajectories, episode.result.trajectories, strict=True):
        assert (read.uid, read.ids(), read.loss_mask()) == (kept.uid, kept.ids(), kept.loss_mask())


def trajectory(uid, *steps, version=3):
    made = Trajectory(uid=TrajectoryUid(uid))
    for observation, sampled in steps:
        made.append(
            Step(
                observation_ids=observation,
                sampled_ids=sampled,
                logprobs=[-float(token) for token in sampled],
                policy_versions=[version] * len(sampled),
                temperature=1.0,
                finish_reason="stop",
            )
        )
    return made


def record_of(*branches):
    """Of trajectories with the numbers of the turns that lead to them."""
    trajectories, paths = zip(*branches, strict=True)
    return SessionRecord(
        id=SessionId("s"), uid=EpisodeUid("e"), trajectories=trajectories, paths=paths, messages=(), turn_texts=(), num_turns=9
    )


def masked(branch):
    return list(zip(branch.ids(), branch.loss_mask(), branch.logprobs(), strict=True))


def test_shared_turns_are_found_in_whichever_branch_has_most_of_them():
    # A tree: 1|2, then 3|4 or 5|6; after 5|6 comes 7|8 or 9|9. The record trains on each turn in the first branch that holds it.
    record = record_of(
        (trajectory("t0", ([1], [2]), ([3], [4])), (0, 1)),
        (trajectory("t1", ([1, 2, 5], [6]), ([7], [8])), (0, 2, 3)),
        (trajectory("t2", ([1, 2, 5, 6, 9], [9])), (0, 2, 4)),
    )
    (last,) = trained_branches(record, "last")
    assert last.uid == "t2"
    assert masked(last) == [(1, 0, 0.0), (2, 1, -2.0), (5, 0, 0.0), (6, 1, -6.0), (9, 0, 0.0), (9, 1, -9.0)]


def test_a_branch_that_begins_anew_shares_nothing_even_where_its_prompt_begins_alike():
    record = record_of((trajectory("t0", ([1, 2], [3])), (0,)), (trajectory("t1", ([1, 2, 4], [5])), (1,)))
    (last,) = trained_branches(record, "last")
    assert masked(last) == [(1, 0, 0.0), (2, 0, 0.0), (4, 0, 0.0), (5, 1, -5.0)]


def test_one_branch_is_the_same_with_either_choice():
    record = record_of((trajectory("t0", ([1], [2])), (0,)))
    assert trained_branches(record, "last") == trained_branches(record, "shared") == record.trajectories


def test_a_shared_turn_is_the_one_that_was_continued_and_not_another_that_says_the_same():
    # Turns 0 and 1 say the same (2) to the same question (1), from weights 3 and 4. Turns 2 and 3 continue turn 1.
    record = record_of(
        (trajectory("t0", ([1], [2]), version=3), (0,)),
        (trajectory("t1", ([1], [2]), ([5], [6]), version=4), (1, 2)),
        (trajectory("t2", ([1, 2, 7], [8]), version=5), (1, 3)),
    )
    (last,) = trained_branches(record, "last")
    assert last.ids() == [1, 2, 7, 8]
    assert last.versions() == [-1, 4, -1, 5]
