"""Runs over two nodes: raylets on this machine, each at an address of its own. One is killed in mid-run."""

import pytest

from psrl.telemetry import names
from tests.cluster.nodes import SECOND_ADDRESS, two_nodes
from tests.faults.faulty_run import STOP_LIMIT_S, FaultyRun

pytestmark = pytest.mark.slow

TWO_OF_EACH = ("psrl.deployment.num_instances=2", "gen_actor_rollout_ref.rollout.agent.num_workers=2")
EVERY_STEP = ("trainer.save_freq=1",)


def line_of(address: str, output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(f"{address}: "))


@pytest.mark.parametrize("gateway", [(), ("psrl.rollout_gateway.enable=true",)], ids=["native", "behind SMG"])
def test_a_run_goes_on_after_the_node_of_a_replica_and_an_agent_worker_is_lost(tmp_path, gateway):
    with two_nodes() as nodes:
        run = FaultyRun(tmp_path, "lost node", settings=(*TWO_OF_EACH, *nodes.settings(), *gateway))
        run.begin()
        run.until_steps(2)
        assert line_of(SECOND_ADDRESS, run.now.log()) == f"{SECOND_ADDRESS}: engine replica 0, agent worker 0"
        crossed = [run.metrics()[step] for step in range(1, run.num_steps() + 1)]
        assert sum(metrics[names.NETWORK_WEIGHTS_BYTES] for metrics in crossed) > 3e6  # the model has 0.9M parameters of 4 bytes
        assert sum(metrics[names.NETWORK_ROWS_BYTES] for metrics in crossed) > 0
        nodes.kill_second()
        run.until_steps(2)
        run.until_recovered("engine replica 0")
        run.until_recovered("agent worker 0")
        run.until_steps(3)
        here = nodes.address.partition(":")[0]
        for moved in ("engine replica 0", "agent worker 0"):
            assert f"{moved} goes to {here}: its node is lost" in run.now.log()
        run.stop()
    run.check_record()


def test_a_run_whose_ranks_are_lost_stops_with_the_cause_and_goes_on_from_its_checkpoint(tmp_path):
    with two_nodes(cpus_of_first=3) as nodes:
        run = FaultyRun(tmp_path, "lost ranks", settings=(*EVERY_STEP, *nodes.settings()))
        run.begin()
        run.until_steps(2)
        assert line_of(SECOND_ADDRESS, run.now.log()) == f"{SECOND_ADDRESS}: train worker, parameter server, TransferQueue storage"
        nodes.kill_second()
        output = run.now.output(STOP_LIMIT_S)
        assert run.now.process.returncode == 1
        assert any(f"{lost} died" in output for lost in ("train worker 0", "TransferQueue's storage unit 0", "TransferQueue's controller"))
        nodes.add_second()
        run.finish()
    run.check_record()
