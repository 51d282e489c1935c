"""The processes of a run with their cores and memory, worked out before anything starts.

Memory is an estimate from the model's own files: what must be held, plus what an interpreter with its libraries takes (measured
on Linux). Training and generation alternate while psrl.staleness is 0, so each of them may use every core, and cores are checked
per kind of process; memory is held by all of them at once and is checked as a sum.

Legend: P parameters, L layers, K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.gateway_checks import starts_gateway
from psrl.config.machine import Machine
from psrl.config.model_size import read_model_size
from psrl.config.plan_of_cards import CARD_SHARE, engines_on_cards
from psrl.config.plan_of_engines import engine_replicas, parameter_server
from psrl.config.plan_of_episodes import processes_of_episodes
from psrl.config.plan_of_training import fine_tuning, train_workers
from psrl.config.planned_process import MIB, PROCESS_BYTES, PlannedProcess
from psrl.config.tree import Config
from psrl.errors import ConfigError

MEMORY_SHARE = 0.95
"""Of the machine's memory; the rest is the operating system's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All processes of a run."""

    machine: Machine
    processes: tuple[PlannedProcess, ...]

    @property
    def memory_bytes(self) -> int:
        """Of all processes together."""
        return sum(process.count * process.memory_bytes for process in self.processes)

    @property
    def num_processes(self) -> int:
        """How many there are."""
        return sum(process.count for process in self.processes)


def make_plan(config: Config, machine: Machine, *, with_training: bool = True) -> Plan:
    """Work out the processes of a training run, or of validation alone, and whether this machine can hold them.

    Raises:
        ConfigError: It cannot; the message names the largest process and the setting that makes it smaller.
    """
    processes = planned_processes(config, machine, with_training=with_training)
    _check_devices(config, machine, with_training=with_training)
    return checked(Plan(machine=machine, processes=processes))


def planned_processes(config: Config, machine: Machine, *, with_training: bool) -> tuple[PlannedProcess, ...]:
    """All processes of a run, with what each of them needs on such a machine."""
    size = read_model_size(config.train_actor_rollout_ref.model.path)
    return (
        PlannedProcess(
            role="controller",
            count=1,
            num_cores=0,
            memory_bytes=PROCESS_BYTES["torch"] + PROCESS_BYTES["ray"],
            reason="driver and Ray's own processes",
            key="data.train_batch_size",
        ),
        *((train_workers(config, machine, size),) if with_training else ()),
        engines_on_cards(engine_replicas(config, machine, size), config, machine, size),
        _agent_workers(config),
        *_gateway(config),
        *processes_of_episodes(config, num_cores=machine.num_cores),
        _transfer_queue(config),
        parameter_server(config, size, with_training=with_training),
    )


def make_sft_plan(config: Config, machine: Machine) -> Plan:
    """Work out the one process of supervised fine-tuning and whether this machine can hold it.

    Raises:
        ConfigError: As make_plan.
    """
    return checked(Plan(machine=machine, processes=(fine_tuning(config, machine),)))


def checked(plan: Plan) -> Plan:
    """The plan. ConfigError: the machine cannot hold it."""
    _check_cores(plan)
    _check_memory(plan)
    _check_cards(plan)
    return plan


def _agent_workers(config: Config) -> PlannedProcess:
    agent = config.gen_actor_rollout_ref.rollout.agent
    graders = config.reward.num_processes * PROCESS_BYTES["plain"]
    return PlannedProcess(
        role="agent worker",
        count=agent.num_workers,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["torch"] + graders,
        reason=f"episodes, tokenizer, {config.reward.num_processes} grading processes",
        key="gen_actor_rollout_ref.rollout.agent.num_workers",
    )


def _gateway(config: Config) -> tuple[PlannedProcess, ...]:
    """SMG, the session router, and the Ray process that keeps them."""
    if not starts_gateway(config):
        return ()
    rollout = config.gen_actor_rollout_ref.rollout
    num_episodes = rollout.agent.num_workers * rollout.agent.max_concurrent_episodes
    # Per token of a session: Python's integers and floats of ids, logprobs and versions.
    sessions = num_episodes * (rollout.prompt_length + rollout.response_length) * 64
    key = "gen_actor_rollout_ref.rollout.agent.max_concurrent_episodes"
    rows = (
        ("gateway", PROCESS_BYTES["plain"], "keeps SMG and the session router"),
        ("SMG", PROCESS_BYTES["smg"], "sends turns to the engines"),
        ("session router", PROCESS_BYTES["torch"] + sessions, f"tokenizer; tokens of {num_episodes} sessions {sessions / MIB:.0f} MiB"),
    )
    return tuple(
        PlannedProcess(role=role, count=1, num_cores=0, memory_bytes=memory, reason=reason, key=key) for role, memory, reason in rows
    )


def _transfer_queue(config: Config) -> PlannedProcess:
    queue, rollout = config.transfer_queue, config.gen_actor_rollout_ref.rollout
    rows = config.data.train_batch_size * config.psrl.rollout_n
    # Per token: ids and versions 8 bytes each, logprobs and turn indices 4 each, the mask 1.
    row_bytes = (rollout.prompt_length + rollout.response_length) * (8 + 8 + 4 + 4 + 1)
    return PlannedProcess(
        role="TransferQueue",
        count=queue.num_data_storage_units + 1,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["torch"] + rows * row_bytes // queue.num_data_storage_units,
        reason=f"controller and storage of {rows} trajectories",
        key="data.train_batch_size",
    )


def _check_devices(config: Config, machine: Machine, *, with_training: bool) -> None:
    wanted = {"gen_actor_rollout_ref.rollout.device": config.gen_actor_rollout_ref.rollout.device}
    if with_training:
        wanted["trainer.device"] = config.trainer.device
    for key, device in wanted.items():
        if device == "cuda" and machine.num_gpus == 0:
            raise ConfigError(key=key, value=device, rule="this machine has no CUDA GPU", fix=f"set {key}=cpu or {key}=auto")


def _check_cores(plan: Plan) -> None:
    for process in plan.processes:
        needed = process.count * process.num_cores
        if needed > plan.machine.num_cores:
            key = "trainer.num_workers" if process.role == "train worker" else "gen_actor_rollout_ref.rollout.num_replicas"
            rule = f"{process.count} x {process.role} of {process.num_cores} threads needs {needed} cores of {plan.machine.num_cores}"
            fix = f"set {key} to at most {max(1, plan.machine.num_cores // process.num_cores)}, or num_threads of that section lower"
            raise ConfigError(key=key, value=process.count, rule=rule, fix=fix)


def _check_cards(plan: Plan) -> None:
    """One process on one card; which processes share one is known when they are placed."""
    available = int(plan.machine.gpu_bytes * CARD_SHARE)
    for process in plan.processes:
        if available and process.gpu_bytes > available:
            needed = f"{process.gpu_bytes / 2**30:.1f} GiB"
            rule = f"{process.role} needs {needed} of a card, which has {available / 2**30:.1f} ({process.reason})"
            more = ", or raise trainer.num_workers" if process.role == "train worker" else ""
            raise ConfigError(key=process.key, value=needed, rule=rule, fix=f"lower {process.key}{more}")


def _check_memory(plan: Plan) -> None:
    available = int(plan.machine.memory_bytes * MEMORY_SHARE)
    if plan.memory_bytes <= available:
        return
    largest = max(plan.processes, key=lambda process: process.count * process.memory_bytes)
    rule = (
        f"the plan needs {plan.memory_bytes / 2**30:.1f} GiB, this machine has {available / 2**30:.1f}; "
        f"most of it for {largest.count} x {largest.role} ({largest.reason})"
    )
    raise ConfigError(key=largest.key, value=f"{largest.memory_bytes / 2**30:.1f} GiB each", rule=rule, fix=f"lower {largest.key}")
