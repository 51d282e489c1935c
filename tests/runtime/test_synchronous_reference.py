"""With `psrl.staleness=0` a run trains on exactly what a plain synchronous loop trains on.

The loop here has no ledger, no board, no coordinator and no Ray: it takes the next tasks, plays them all, trains, gives the engine the
weights, and begins again. It and `psrl train` must have the same tokens, versions and rewards.
"""

import asyncio
from pathlib import Path

from psrl.config.load import load_config
from psrl.data_plane import KVBatchMeta, MemoryDataPlane
from psrl.engine_client.client import HttpReplica
from psrl.parameter_server.push import publish_tensors
from psrl.processes.child import ChildProcess
from psrl.runtime.build import agent_worker_settings, load_tasks, run_renderer
from psrl.runtime.engines import engine_command
from psrl.runtime.groups import AgentWorker, Endpoints, GroupRequest
from psrl.runtime.tickets import training_tickets
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import read_trajectories
from psrl.training.worker import TrainRank
from tests.runtime.command import start

STEPS, GROUPS = 3, 4
SETTINGS = (
    "data.generator.num_val=4",
    f"data.train_batch_size={GROUPS}",
    "psrl.rollout_n=4",
    "train_actor_rollout_ref.rollout.n=1",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.trajectories_per_step=0",
    f"trainer.total_training_steps={STEPS}",
)
START_LIMIT_S = 120.0

Played = dict[tuple[int, str], tuple[list[int], list[int], float]]
"""(step, episode) -> ids, versions, reward"""


async def synchronously(folder: Path) -> Played:
    config = load_config("retool_tiny", SETTINGS)
    plane, played = MemoryDataPlane(), {}
    model, actor = config.train_actor_rollout_ref.model, config.train_actor_rollout_ref.actor
    rank = TrainRank(
        model=model,
        actor=actor,
        ref=config.train_actor_rollout_ref.ref,
        algorithm=config.algorithm,
        critic=config.critic,
        total_steps=STEPS,
        seed=config.trainer.seed,
        device="cpu",
        rank=0,
        world_size=1,
        data_plane=plane,
    )
    rank.setup("")
    source = load_tasks(config, run_renderer(config))
    engine = ChildProcess("engine", engine_command(model, config.gen_actor_rollout_ref.rollout), log_path=folder / "engine.log")
    worker = AgentWorker(agent_worker_settings(config), data_plane=plane)
    await asyncio.gather(engine.start(START_LIMIT_S), worker.start())
    replica = HttpReplica(engine.url)
    try:
        await worker.connect(Endpoints(generate_urls=[engine.url]))
        for step in range(1, STEPS + 1):
            results = []
            for task in source.next_tasks(GROUPS):
                tickets = training_tickets(task, rollout_n=config.psrl.rollout_n, version=step - 1, run_seed=config.trainer.seed)
                results.append(await worker.run_group(GroupRequest(task=task, tickets=tickets, wants_records=True)))
            results.sort(key=lambda result: result.group)
            for episode in (episode for result in results for episode in result.records):
                (trajectory,) = episode.result.trajectories
                played[step, episode.ticket.uid] = (trajectory.ids(), trajectory.versions(), episode.score.reward)
            keys = [key for result in results for key in result.meta.keys]
            tags = [tag for result in results for tag in result.meta.tags]
            rank.train_step(KVBatchMeta(keys=keys, tags=tags, partition_id="train"), version=step - 1)
            shared = publish_tensors(rank.named_full_tensors(), step)
            await replica.stage_weights(shared.manifest)
            await replica.pause("wait")
            await replica.finish_weights(step)
            await replica.resume()
            shared.close()
    finally:
        await worker.stop()
        await replica.close()
        engine.stop()
    return played


def test_staleness_zero_is_the_synchronous_loop_sample_for_sample(tmp_path):
    expected = asyncio.run(synchronously(tmp_path))
    command = start(tmp_path, "train", "retool_tiny", *SETTINGS, f"trainer.default_local_dir={tmp_path}")
    output = command.output(300)
    assert command.process.returncode == 0, output
    found = {}
    for record in read_trajectories(RunFolder.latest(tmp_path, "retool_tiny").trajectories / "train.jsonl"):
        (trajectory,) = record.episode.result.trajectories
        found[record.step, record.episode.ticket.uid] = (trajectory.ids(), trajectory.versions(), record.episode.score.reward)
    assert len(expected) == STEPS * GROUPS * 4
    assert found == expected
