"""What `psrl simulate` is told of the time that things take: options, a run folder, or a run folder with some of it said otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError
from psrl.simulation import Failures, Workload, measured_workload
from psrl.simulation.instance import Pace
from psrl.simulation.measured import MeasuredEpisodes, waits_for_turns
from psrl.simulation.workload import DrawnEpisodes
from psrl.types.latency import Latency

RATES = {"replica": "replica_per_s", "worker": "worker_per_s", "episode": "episode_share"}
SECONDS = ("train", "push", "rest", "sync", "pause")
SAY_TURNS = ("turn", "tokens", "token_s")
OF_EPISODES = ("turns", "tool", "reward", "token_s_per_sequence")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """As they stand on the command line; None was not said."""

    turn: str | None = None
    tokens: str | None = None
    token_s: float | None = None
    token_s_per_sequence: float | None = None
    turns: str | None = None
    tool: str | None = None
    reward: str | None = None
    train: str | None = None
    push: str | None = None
    rest: str | None = None
    sync: str | None = None
    pause: str | None = None
    recompute: float | None = None
    equal_share: float | None = None
    failure_rate: tuple[str, ...] = ()
    restart_s: float | None = None
    from_steps: str | None = None

    @property
    def say_nothing(self) -> bool:
        """Whether no option says how long turns or updates take."""
        return all(getattr(self, name) is None for name in (*SAY_TURNS, "train"))


def read_workload(options: WorkloadOptions, run: Path | None) -> Workload:
    """What was measured in `run`, where one is named, and the options, which win.

    Raises:
        ConfigError: An option cannot be read or has no effect, or nothing says how long turns, updates or syncs take.
    """
    measured = _measured(options, run)
    if run is not None and waits_for_turns(run) and (options.sync is None or options.pause is None):
        rule = "was made with psrl.partial_rollout.enable=false: the seconds of its syncs include those in which turns ended"
        raise ConfigError(key="--from", value=str(run), rule=rule, fix="write --sync and --pause too, both without that time")
    has_turns = any(getattr(options, name) is not None for name in SAY_TURNS)
    if measured is None and options.train is None:
        rule = "nothing says how long an update takes"
        raise ConfigError(key="--train", value=None, rule=rule, fix="write --train 3.0, or --from RUN_FOLDER")
    if measured is None or has_turns:
        workload = _with_turns(measured, options)
    else:
        _refuse_parts_of_episodes(options, run)
        workload = measured
    seconds: dict[str, Any] = {name: _latency(name, text) for name in SECONDS if (text := getattr(options, name)) is not None}
    workload = replace(workload, **seconds)
    if options.recompute is not None:
        workload = replace(workload, recompute_s=_positive("--recompute", options.recompute))
    if options.equal_share is not None:
        workload = replace(workload, equal_share=_share("--equal-share", options.equal_share))
    return replace(workload, failures=_failures(options, workload.failures))


def _measured(options: WorkloadOptions, run: Path | None) -> Workload | None:
    if options.from_steps is None:
        return None if run is None else measured_workload(run)
    if run is None:
        rule = "has no effect without --from"
        raise ConfigError(key="--from-steps", value=options.from_steps, rule=rule, fix="write --from RUN_FOLDER too")
    first, last = _range("--from-steps", options.from_steps, "steps")
    return measured_workload(run, first_step=first, last_step=last)


def _refuse_parts_of_episodes(options: WorkloadOptions, run: Path | None) -> None:
    for name in OF_EPISODES:
        if getattr(options, name) is not None:
            rule = "has no effect with --from alone, whose episodes are taken whole"
            fix = f"leave out {_flag(name)}, or say how long turns are too (--turn, or --tokens and --token-s)"
            raise ConfigError(key=_flag(name), value=str(run), rule=rule, fix=fix)


def _with_turns(measured: Workload | None, options: WorkloadOptions) -> Workload:
    """Turns as the options say; tools and grading as measured, where they were and the options do not say them."""
    in_tokens = options.token_s is not None
    work = options.tokens if in_tokens else options.turn
    if work is None or (in_tokens and options.turn is not None):
        rule = "says how long a turn takes, and so do --tokens with --token-s: one of the two is needed"
        fix = "write --turn lognormal:median=2,sigma=1, or --tokens lognormal:median=200,sigma=1 --token-s 0.02"
        raise ConfigError(key="--turn", value=options.turn, rule=rule, fix=fix)
    if options.token_s_per_sequence is not None and not in_tokens:
        rule = "has no effect without --token-s"
        raise ConfigError(key="--token-s-per-sequence", value=options.token_s_per_sequence, rule=rule, fix="write --token-s 0.02 too")
    turn = _latency("tokens" if in_tokens else "turn", work)
    if not 0 < turn.mean() < float("inf"):
        rule = f"has the mean {turn.mean():g}"
        raise ConfigError(
            key=_flag("tokens" if in_tokens else "turn"), value=work, rule=rule, fix="give it a positive, finite mean (max=...)"
        )
    few, many = _range("--turns", options.turns or "1", "turns")
    tool, grading = _latency("tool", options.tool or "0"), _latency("reward", options.reward or "0")
    if measured is not None and isinstance(measured.episodes, MeasuredEpisodes):
        tool = measured.episodes.tools() if options.tool is None else tool
        grading = measured.episodes.grading() if options.reward is None else grading
    episodes = DrawnEpisodes(
        turn=turn,
        tool=tool,
        reward=grading,
        min_turns=few,
        max_turns=many,
        tokens=_latency("tokens", options.tokens or "0"),
        is_work_in_tokens=in_tokens,
    )
    return replace(
        measured or Workload(episodes=episodes),
        episodes=episodes,
        pace=Pace(base_s=_positive("--token-s", options.token_s or 1.0), per_running_s=options.token_s_per_sequence or 0.0),
        tokens_per_work=1.0 if in_tokens else episodes.tokens.mean() / turn.mean(),
    )


def _failures(options: WorkloadOptions, measured: Failures) -> Failures:
    failures = measured if options.restart_s is None else replace(measured, restart_s=_positive("--restart-s", options.restart_s))
    for text in options.failure_rate:
        what, _, number = text.partition("=")
        try:
            rate = float(Fraction(number)) if "/" in number else float(number)
        except (ValueError, ZeroDivisionError):
            rate = -1.0
        if what not in RATES or not 0 <= rate < (1 if what == "episode" else float("inf")):
            rule = f"is none of {', '.join(RATES)} with a number of deaths per second (of episodes: the share that fails, below 1)"
            raise ConfigError(key="--failure-rate", value=text, rule=rule, fix="write --failure-rate replica=1/3600")
        failures = replace(failures, **{RATES[what]: rate})
    return failures


def _range(flag: str, text: str, what: str) -> tuple[int, int]:
    few, dash, many = text.partition("-")
    numbers = (few, many if dash else few)
    if not all(number.isdecimal() for number in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        fix = f"write {flag} 3 or {flag} 1-4"
        raise ConfigError(key=flag, value=text, rule=f"is no number of {what} and no range of them", fix=fix)
    return int(numbers[0]), int(numbers[1])


def _latency(name: str, text: str) -> Latency:
    return Latency.parse(text, key=_flag(name))


def _positive(flag: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(key=flag, value=value, rule="must be a positive number of seconds", fix=f"write {flag} 0.02")
    return value


def _share(flag: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(key=flag, value=value, rule="must be from 0 to below 1", fix=f"write {flag} 0.3")
    return value


def _flag(name: str) -> str:
    assert name in {field.name for field in fields(WorkloadOptions)}, name
    return f"--{name.replace('_', '-')}"
