"""`check_environment`: does an environment keep the contract? For its author to run, before any model sees it.

It plays real episodes with actions that the author gives, and lists everything that is wrong at once.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from psrl.environments.base import Environment, EnvironmentParts, environments, instantiate
from psrl.errors import EnvironmentFault
from psrl.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One broken rule."""

    rule: str
    """Short name of the rule, such as `step returns`."""
    task: str
    """Uid of the task on which it was seen."""
    detail: str

    def __str__(self) -> str:
        return f"{self.rule} (task {self.task}): {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReport:
    """What a check saw."""

    environment: str
    num_episodes: int
    num_steps: int
    num_done: int
    """Episodes that the environment itself ended within the given actions."""
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        head = f"{self.environment}: {self.num_episodes} episodes, {self.num_steps} steps, {self.num_done} done"
        return "\n".join([f"{head}: {'ok' if not self.findings else f'{len(self.findings)} findings'}", *(f"- {f}" for f in self.findings)])


@dataclass(slots=True)
class _Played:
    """What one episode gave, in a form that can be compared."""

    answers: list[Any] = field(default_factory=list)
    num_steps: int = 0
    is_done: bool = False


def check_environment(
    environment: type | str,
    tasks: Sequence[Task],
    actions: Sequence[Any] | Callable[[Task], Sequence[Any]],
    *,
    parts: EnvironmentParts | None = None,
    is_deterministic: bool = True,
    timeout_s: float = 10.0,
) -> EnvironmentReport:
    """Play `actions` on each task and check what comes back.

    Checked: what `reset` and `step` return; info that JSON can hold; `close` twice, before `reset` and after a cancelled step; a step
    before `reset` and one after the end (either may raise, but must return); that episodes which run at the same time do not
    disturb each other; and that the same actions give the same answers.

    Args:
        environment: The class, its registered name or its dotted path.
        tasks: At least one.
        actions: What the policy does, in order; an episode ends where the environment says done or they run out. A function
            chooses them by task.
        parts: For environments with a `build`.
        is_deterministic: False where the same actions may rightly give different answers; then only shapes are compared.
        timeout_s: Of each call.

    Raises:
        EnvironmentFault: A rule is broken; the message lists every finding.
        ConfigError: The name names nothing.
    """
    assert tasks, "check_environment needs at least one task"
    environment_class = environments.resolve(environment) if isinstance(environment, str) else environment
    checker = _Checker(environment_class, parts or EnvironmentParts(), is_deterministic, timeout_s)
    report = asyncio.run(checker.check([(task, list(actions(task) if callable(actions) else actions)) for task in tasks]))
    if report.findings:
        raise EnvironmentFault(str(report))
    return report


class _Checker:
    def __init__(self, environment_class: type, parts: EnvironmentParts, is_deterministic: bool, timeout_s: float) -> None:
        self._class = environment_class
        self._parts = parts
        self._is_deterministic = is_deterministic
        self._timeout_s = timeout_s
        self._findings: list[Finding] = []
        self._num_episodes = 0
        self._num_steps = 0

    async def check(self, plays: Sequence[tuple[Task, list[Any]]]) -> EnvironmentReport:
        alone = [await self._play(task, actions) for task, actions in plays]
        if not self._findings:  # What is broken alone would only be told again.
            await self._check_together(plays, alone)
            for task, actions in plays:
                await self._check_endings(task, actions)
        return EnvironmentReport(
            environment=f"{self._class.__module__}.{self._class.__qualname__}",
            num_episodes=self._num_episodes,
            num_steps=self._num_steps,
            num_done=sum(played.is_done for played in alone),
            findings=tuple(dict.fromkeys(self._findings)),
        )

    async def _play(self, task: Task, actions: list[Any]) -> _Played:
        """One episode, closed twice."""
        self._num_episodes += 1
        played = _Played()
        environment = self._make(task)
        if environment is None:
            return played
        ok, answer = await self._call(task, "reset", environment.reset(task))
        if ok and self._has_shape(task, "reset", answer, "(observation, info)", 2):
            played.answers.append(answer)
            await self._play_steps(task, environment, actions, played)
        await self._call(task, "close", environment.close())
        await self._call(task, "close twice", environment.close())
        return played

    async def _play_steps(self, task: Task, environment: Environment[Any, Any], actions: list[Any], played: _Played) -> None:
        for action in actions:
            ok, answer = await self._call(task, "step", environment.step(action))
            if not ok or not self._has_shape(task, "step", answer, "(observation, reward, done, info)", 4):
                return
            self._num_steps += 1
            played.answers.append(answer)
            _, reward, done, _ = answer
            if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
                self._find("step returns", task, f"the reward is {reward!r:.80}, it must be a finite number or None")
            if not isinstance(done, bool):
                self._find("step returns", task, f"done is {done!r:.80}, it must be True or False")
            if done:
                played.is_done = True
                return

    async def _check_together(self, plays: Sequence[tuple[Task, list[Any]]], alone: Sequence[_Played]) -> None:
        """The same episodes, twice each and all at once: state shared between objects shows as answers that differ."""
        together = await asyncio.gather(*(self._play(task, actions) for task, actions in [*plays, *plays]))
        for (task, _), first, second in zip([*plays, *plays], [*alone, *alone], together, strict=True):
            if len(first.answers) != len(second.answers) or (self._is_deterministic and _seen(first) != _seen(second)):
                detail = f"alone {first.answers!r:.200}, beside others {second.answers!r:.200}"
                rule = "same actions, same answers" if self._is_deterministic else "same actions, same length"
                self._find(rule, task, f"{detail}; objects share state, or is_deterministic=False is missing")

    async def _check_endings(self, task: Task, actions: list[Any]) -> None:
        """Closing without a reset, steps at the wrong time, and a step that is cancelled."""
        unused = self._make(task)
        if unused is not None:
            await self._call(task, "close before reset", unused.close())
        cancelled = self._make(task)
        if cancelled is None or not actions:
            return
        await self._check_steps_at_wrong_times(task, actions)
        await self._call(task, "reset", cancelled.reset(task))
        step = asyncio.ensure_future(cancelled.step(actions[0]))
        await asyncio.sleep(0)  # Lets the step begin; one that never waits is over by now.
        step.cancel()
        done, _ = await asyncio.wait({step}, timeout=self._timeout_s)
        if not done:
            self._find("cancellation", task, f"a cancelled step went on for {self._timeout_s:g} s; do not catch asyncio.CancelledError")
        elif not step.cancelled():
            step.exception()  # Retrieved: what a step raises while it is cancelled is not asked for.
        await self._call(task, "close after a cancelled step", cancelled.close())

    async def _check_steps_at_wrong_times(self, task: Task, actions: list[Any]) -> None:
        """Before `reset` and after done: may raise or answer, as long as it ends and `close` still works."""
        early = self._make(task)
        if early is not None:
            await self._ends(task, "step before reset", early.step(actions[0]))
            await self._call(task, "close after a step before reset", early.close())
        late = self._make(task)
        if late is None:
            return
        await self._call(task, "reset", late.reset(task))
        await self._play_steps(task, late, actions, _Played())
        await self._ends(task, "step after the end", late.step(actions[-1]))
        await self._call(task, "close after a step after the end", late.close())

    def _make(self, task: Task) -> Environment[Any, Any] | None:
        try:
            environment = instantiate(self._class, self._parts)
        except Exception as error:  # noqa: BLE001 whatever an author's code raises is a finding
            self._find("construction", task, f"raised {type(error).__name__}: {error}")
            return None
        missing = [name for name in ("reset", "step", "close") if not inspect.iscoroutinefunction(getattr(environment, name, None))]
        if missing:
            self._find("methods", task, f"{', '.join(missing)} must be there, as `async def`")
            return None
        return environment

    async def _call(self, task: Task, rule: str, work: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        running = await self._ends(task, rule, work)
        if running is None:
            return False, None
        error = asyncio.CancelledError() if running.cancelled() else running.exception()
        if error is not None:
            self._find(rule, task, f"raised {type(error).__name__}: {error}")
            return False, None
        return True, running.result()

    async def _ends(self, task: Task, rule: str, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any] | None:
        """The work when it is done, with an answer or an exception; None, and a finding, when it takes too long."""
        running = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({running}, timeout=self._timeout_s)
        if done:
            if not running.cancelled():
                running.exception()  # Retrieved, so that an exception which is allowed is not logged.
            return running
        running.cancel()
        self._find(rule, task, f"took longer than {self._timeout_s:g} s")
        return None

    def _has_shape(self, task: Task, method: str, answer: Any, shape: str, length: int) -> bool:
        if not isinstance(answer, tuple) or len(answer) != length:
            self._find(f"{method} returns", task, f"{answer!r:.80}, it must be {shape}")
            return False
        info = answer[-1]
        if not isinstance(info, dict):
            self._find(f"{method} returns", task, f"info is {info!r:.80}, it must be a dict")
            return False
        try:
            json.dumps(info, allow_nan=False)
        except (TypeError, ValueError) as error:
            self._find(f"{method} info", task, f"{info!r:.80} cannot be written as JSON: {error}")
        return True

    def _find(self, rule: str, task: Task, detail: str) -> None:
        self._findings.append(Finding(rule=rule, task=task.uid, detail=detail))


def _seen(played: _Played) -> str:
    """The answers as text, without the addresses that Python prints for objects that have no `__repr__`."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(played.answers))
