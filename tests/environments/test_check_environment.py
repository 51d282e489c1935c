"""`check_environment` passes what keeps the contract and names each thing that does not."""

import asyncio
import itertools

import pytest

from psrl.environments import Environment, check_environment
from psrl.errors import ConfigError, EnvironmentFault
from psrl.types import Message, ParsedTurn, Role, Task, TaskUid

TASKS = [Task(uid=TaskUid(f"t{i}"), prompt=(Message(role=Role.USER, content=f"hi {i}"),), data_source="test") for i in range(3)]


class Counting(Environment[int, int]):
    """Done at 3."""

    def __init__(self):
        self.value = 0

    async def reset(self, task):
        return self.value, {}

    async def step(self, action):
        await asyncio.sleep(0)
        self.value += action
        return self.value, 0.5, self.value >= 3, {"value": self.value}

    async def close(self):
        pass


def test_a_sound_environment_passes_and_the_report_counts():
    report = check_environment(Counting, TASKS, [1, 1, 1, 1])
    # 3 tasks x (alone + twice together), 3 steps each, and 3 steps more for each task's step after the end.
    assert (report.num_episodes, report.num_steps, report.num_done, report.findings) == (9, 36, 3, ())
    assert str(report) == f"{__name__}.Counting: 9 episodes, 36 steps, 3 done: ok"


@pytest.mark.parametrize(
    ("name", "action"), [("tool_env", ParsedTurn(content="x", reasoning=None, calls=(), text="x")), ("single_turn", "x")]
)
def test_the_environments_that_psrl_brings_pass(name, action):
    assert check_environment(name, TASKS, [action]).num_done == 3


def test_actions_can_be_chosen_by_task():
    assert check_environment(Counting, TASKS, lambda task: [3] if task.uid == "t0" else [1]).num_done == 1


class ResetOfOne(Counting):
    async def reset(self, task):
        return "only an observation"


class StepOfThree(Counting):
    async def step(self, action):
        return 1, 0.0, True


class InfoOfObjects(Counting):
    async def step(self, action):
        return 1, 0.0, True, {"x": object()}


class InfoIsNone(Counting):
    async def reset(self, task):
        return 1, None


class NanReward(Counting):
    async def step(self, action):
        return 1, float("nan"), True, {}


class DoneIsAWord(Counting):
    async def step(self, action):
        return 1, 0.0, "yes", {}


class ClosesOnce(Counting):
    is_open = True

    async def close(self):
        if not self.is_open:
            raise RuntimeError("already closed")
        self.is_open = False


class NeedsResetToClose(Counting):
    def __init__(self):
        pass

    async def reset(self, task):
        self.value = 0
        return 0, {}

    async def close(self):
        del self.value
        self.value = 0


class SharesState(Counting):
    values = itertools.count()

    async def step(self, action):
        return next(self.values), 0.0, False, {}


class HangsLate(Counting):
    async def step(self, action):
        if self.value >= 3:
            await asyncio.Event().wait()
        return await super().step(action)


class Hangs(Counting):
    async def step(self, action):
        await asyncio.Event().wait()


class NotAsync(Counting):
    def step(self, action):
        return 1, 0.0, True, {}


class NeedsArguments(Counting):
    def __init__(self, size):
        pass


class Raises(Counting):
    async def step(self, action):
        raise ZeroDivisionError("division by zero")


class SwallowsCancellation(Counting):
    async def step(self, action):
        for _ in range(2):
            try:
                await asyncio.sleep(0.15)
            except asyncio.CancelledError:
                await asyncio.sleep(0.4)
        return await super().step(action)


BROKEN = [
    (ResetOfOne, "reset returns", "it must be (observation, info)"),
    (StepOfThree, "step returns", "it must be (observation, reward, done, info)"),
    (InfoOfObjects, "step info", "cannot be written as JSON"),
    (InfoIsNone, "reset returns", "info is None"),
    (NanReward, "step returns", "a finite number or None"),
    (DoneIsAWord, "step returns", "done is 'yes'"),
    (ClosesOnce, "close twice", "RuntimeError: already closed"),
    (NeedsResetToClose, "close before reset", "AttributeError"),
    (SharesState, "same actions, same answers", "objects share state"),
    (HangsLate, "step after the end", "took longer than 0.3 s"),
    (Hangs, "step", "took longer than 0.3 s"),
    (NotAsync, "methods", "step must be there, as `async def`"),
    (NeedsArguments, "construction", "TypeError"),
    (Raises, "step", "ZeroDivisionError: division by zero"),
    (SwallowsCancellation, "cancellation", "do not catch asyncio.CancelledError"),
]


@pytest.mark.parametrize(("broken", "rule", "detail"), BROKEN, ids=lambda value: value.__name__ if isinstance(value, type) else "")
def test_what_is_broken_is_named(broken, rule, detail):
    timeout_s = 0.35 if broken is SwallowsCancellation else 0.3
    with pytest.raises(EnvironmentFault) as raised:
        check_environment(broken, TASKS[:1], [1, 1, 1], timeout_s=timeout_s)
    assert f"- {rule} (task t0): " in str(raised.value)
    assert detail in str(raised.value)


def test_answers_that_may_differ_are_allowed_when_said_so():
    class Dice(Counting):
        rolls = itertools.count()

        async def step(self, action):
            return next(self.rolls), 0.0, False, {}

    assert check_environment(Dice, TASKS, [1, 1], is_deterministic=False).findings == ()


def test_an_unknown_name_is_a_config_error():
    with pytest.raises(ConfigError, match=r"rollout\.agent\.env\.name"):
        check_environment("no_such_env", TASKS, [])
