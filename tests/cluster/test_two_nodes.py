"""Runs over two nodes: raylets on this machine, each at an address of its own. One is killed in mid-run."""

import pytest

from psrl.config.load import RECIPES_FOLDER
from psrl.config.model_size import read_model_size
from psrl.telemetry import names
from tests.cluster.nodes import SECOND_ADDRESS, two_nodes
from tests.faults.faulty_run import END_LIMIT_S, STOP_LIMIT_S, FaultyRun

pytestmark = pytest.mark.slow

TWO_OF_EACH = ("psrl.deployment.num_instances=2", "gen_actor_rollout_ref.rollout.agent.num_workers=2")
NETWORK = (
    *(names.NETWORK_WEIGHTS_BYTES, names.NETWORK_WEIGHTS_SECONDS, names.NETWORK_ROWS_BYTES),
    *(names.NETWORK_ROWS_SECONDS, names.NETWORK_TURNS_BYTES, names.NETWORK_TURNS_SECONDS),
)
EVERY_STEP = ("trainer.save_freq=1",)


def line_of(address: str, output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(f"{address}: "))


def crossed(run: FaultyRun, name: str) -> float:
    """What went between the nodes so far."""
    return sum(metrics[name] for metrics in run.metrics().values() if name in metrics)


@pytest.mark.parametrize("gateway", [(), ("psrl.rollout_gateway.enable=true",)], ids=["native", "behind SMG"])
def test_a_run_goes_on_after_the_node_of_a_replica_and_an_agent_worker_is_lost(tmp_path, gateway):
    with two_nodes() as nodes:
        run = FaultyRun(tmp_path, "lost node", settings=(*TWO_OF_EACH, *nodes.settings(), *gateway))
        run.begin()
        run.until_steps(2)
        assert line_of(SECOND_ADDRESS, run.now.log()) == f"{SECOND_ADDRESS}: engine replica 0, agent worker 0"
        while not (crossed(run, names.NETWORK_WEIGHTS_BYTES) and crossed(run, names.NETWORK_ROWS_BYTES)):
            run.until_steps(1)
        version_bytes = 4 * read_model_size(str(RECIPES_FOLDER / "retool_tiny" / "model")).num_parameters
        assert crossed(run, names.NETWORK_WEIGHTS_BYTES) % version_bytes == 0
        assert crossed(run, names.NETWORK_WEIGHTS_SECONDS) > 0
        run.report(0, f"{run.num_steps()} steps: " + ", ".join(f"{name} {crossed(run, name):.3g}" for name in NETWORK))
        nodes.kill_second()
        run.until_steps(2)
        run.until_recovered("engine replica 0")
        run.until_recovered("agent worker 0")
        run.until_steps(3)
        here = nodes.address.partition(":")[0]
        for moved in ("engine replica 0", "agent worker 0"):
            assert f"{moved} goes to {here}: its node is lost" in run.now.log()
        run.now.interrupt()
        run.now.output(END_LIMIT_S)
        assert run.now.process.returncode == 0, run.now.log()
        assert run.now.leftovers() == []
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
        run.go_on(f"trainer.total_training_steps={run.num_steps() + 2}")
        output = run.now.output(END_LIMIT_S)
        assert run.now.process.returncode == 0, output
    run.check_record()
