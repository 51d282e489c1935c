"""Small clusters and workloads for the simulator's tests."""

from psrl.config.psrl_section import PsrlConfig
from psrl.simulation import SimulatedCluster, Workload
from psrl.simulation.workload import NOTHING, DrawnEpisodes
from psrl.types.latency import Latency


def seconds(text) -> Latency:
    return Latency.parse(str(text), key="test")


def workload(turn=1.0, *, tool=0.0, reward=0.0, turns=(1, 1), **more) -> Workload:
    """`more`: fields of Workload; seconds may be written as numbers or texts."""
    times = {name: seconds(more.pop(name)) if name in more else NOTHING for name in ("train", "push", "rest", "sync", "pause")}
    episodes = DrawnEpisodes(turn=seconds(turn), tool=seconds(tool), reward=seconds(reward), min_turns=turns[0], max_turns=turns[1])
    return Workload(episodes=episodes, **times, **more)


def cluster(*, batch=2, slots=4, instances=1, workers=1, places=1000, timeout_s=1e9, drops_equal=False, seed=1, **psrl) -> SimulatedCluster:
    """`psrl`: settings of the section."""
    return SimulatedCluster(
        psrl=PsrlConfig(**{"rollout_n": 2, **psrl}),
        groups_per_buffer=batch,
        num_instances=instances,
        slots_per_instance=slots,
        num_workers=workers,
        episodes_per_worker=places,
        episode_timeout_s=timeout_s,
        drops_equal_rewards=drops_equal,
        seed=seed,
    )
