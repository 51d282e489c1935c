"""`psrl simulate` as a user types it."""

import json

import pytest

from psrl.cli.main import main

TURNS = ("--turn", "1", "--train", "3")
SMALL = ("data.train_batch_size=2", "psrl.rollout_n=2", "gen_actor_rollout_ref.rollout.max_num_seqs=2")


def run_psrl(*arguments):
    """(exit code) of the program, in this process."""
    with pytest.raises(SystemExit) as info:
        main(["simulate", "retool_tiny", *arguments])
    return info.value.code


def reports_of(capsys, *arguments):
    assert run_psrl(*SMALL, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_simulation_prints_throughput_idle_shares_and_staleness(capsys):
    assert run_psrl(*SMALL, *TURNS, "psrl.staleness=1") == 0
    printed = capsys.readouterr().out
    for word in ("episodes trained on per second", "engine slots busy", "waiting for data", "staleness of what was trained on", "bound"):
        assert word in printed


def test_numbers_are_those_of_the_options(capsys):
    # 4 episodes of 2 turns on 2 slots: 4 s, the tools beside the turns of others, then 0.5 s of grading, 3 s of training, 1 s of sync.
    (report,) = reports_of(capsys, *TURNS, "--turns", "2", "--tool", "0.5", "--reward", "0.5", "--sync", "1")
    assert report["step_s"] == pytest.approx(4.0 + 0.5 + 3.0 + 1.0)
    assert report["settings"] == []


def test_turns_in_tokens_take_as_long_as_their_decode_steps(capsys):
    # 50 tokens at 0.01 + 2 * 0.005 s with both slots busy: 1 s a turn, 2 s a batch, 3 s of training.
    arguments = ("--tokens", "50", "--token-s", "0.01", "--token-s-per-sequence", "0.005", "--train", "3")
    (report,) = reports_of(capsys, *arguments)
    assert report["step_s"] == pytest.approx(5.0)
    assert report["tokens_per_s"] == pytest.approx(200 / 5.0)


def test_a_sweep_has_one_simulation_for_each_value(capsys):
    reports = reports_of(capsys, *TURNS, "--sweep", "psrl.staleness=0,1")
    assert [report["settings"] for report in reports] == [["psrl.staleness=0"], ["psrl.staleness=1"]]
    assert reports[0]["step_s"] == pytest.approx(5.0)
    assert reports[1]["step_s"] == pytest.approx(3.0)
    assert run_psrl(*SMALL, *TURNS, "--sweep", "psrl.staleness=0,1") == 0
    assert "staleness=1" in capsys.readouterr().out


def test_turns_that_a_run_would_cut_are_named_with_the_setting(capsys):
    # 4 turns of 1 s on 2 slots: two of them wait for 1 s and are answered after 2 s.
    key = "gen_actor_rollout_ref.rollout.request_timeout_s"
    for limit, is_named in (("3", False), ("1.5", True)):
        assert run_psrl(*SMALL, *TURNS, f"{key}={limit}") == 0
        assert (f"{key}={limit}" in capsys.readouterr().out) == is_named
    assert run_psrl(*SMALL, *TURNS, "--sweep", f"{key}=3,1.5") == 0
    assert f"{key}=1.5" in capsys.readouterr().out


def test_behind_a_gateway_all_replicas_are_one_instance():
    from psrl.config.load import Purpose, load_config
    from psrl.simulation import SimulatedCluster

    replicas = ("gen_actor_rollout_ref.rollout.num_replicas=3", "gen_actor_rollout_ref.rollout.max_num_seqs=4")
    plain, behind = (
        SimulatedCluster.of(load_config("retool_tiny", [*replicas, *more], purpose=Purpose.SIMULATION))
        for more in ((), ("psrl.rollout_gateway.enable=true",))
    )
    assert (plain.num_instances, plain.slots_per_instance, plain.slots_per_replica, plain.num_replicas) == (3, 4, 4, 3)
    assert (behind.num_instances, behind.slots_per_instance, behind.slots_per_replica, behind.num_replicas) == (1, 12, 4, 3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("trainer.default_local_dir=nowhere",), "no run of retool_tiny"),
        (("--turn", "1"), "--train"),
        (("--train", "1"), "--turn"),
        (("--turn", "1", "--tokens", "5", "--token-s", "0.1", "--train", "1"), "--turn"),
        (("--turn", "0", "--train", "1"), "mean"),
        (("--turn", "gamma:a=1", "--train", "1"), "lognormal"),
        ((*TURNS, "--turns", "4-1"), "--turns"),
        ((*TURNS, "--failure-rate", "trainer=1"), "replica"),
        ((*TURNS, "--failure-rate", "episode=1"), "--failure-rate"),
        ((*TURNS, "--token-s-per-sequence", "0.1"), "--token-s"),
        ((*TURNS, "--sweep", "psrl.staleness"), "KEY=A,B"),
        ((*TURNS, "--sweep", "psrl.stalenes=0,1"), "psrl.staleness"),
        ((*TURNS, "--equal-share", "1"), "--equal-share"),
        ((*TURNS, "--recompute", "-1"), "--recompute"),
        (("--from", "nowhere"), "nowhere"),
        ((*TURNS, "--from-steps", "3-9"), "--from RUN_FOLDER"),
    ],
)
def test_wrong_options_say_what_to_write(capsys, arguments, named):
    assert run_psrl(*SMALL, *arguments) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert named in printed and "Fix:" in printed
