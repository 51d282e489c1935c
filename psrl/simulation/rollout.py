"""Groups being played: agent workers with places, episodes that go from turn to tool to turn to grading, members that come too late.

What the agent workers of a run do, with drawn times: a worker plays at most so many episodes at once and the others wait in order; a
group ends when enough members are judged, and the rest of it is cancelled; a turn that is given back, or lost with its instance, is sent
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from psrl.simulation.agent_worker import AgentWorker
from psrl.simulation.events import Event, EventQueue
from psrl.simulation.instance import Instance, Turn
from psrl.simulation.workload import EpisodePlan, rng_of
from psrl.staleness import Admission
from psrl.types import GroupUid, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEnd:
    """A group in which enough members are judged, or all have ended."""

    group: GroupUid
    num_judged: int
    oldest: PolicyVersion | None
    """Oldest weights that sampled a token of the kept members."""
    num_tokens: float
    """Of the kept members."""
    slot_s: float
    """Seconds that the kept members' turns were in a slot."""


class EpisodePlay:
    """One episode on its way; `timer` is what it waits for where it does not wait for a turn."""

    __slots__ = (
        "_rollout",
        "_timeout",
        "_timer",
        "group",
        "index",
        "instance",
        "is_playing",
        "num_retries",
        "num_tokens",
        "oldest",
        "plan",
        "sent_s",
        "slot_s",
        "turn",
        "turn_index",
    )

    def __init__(self, rollout: Rollout, group: GroupPlay, plan: EpisodePlan, *, index: int, instance: int) -> None:
        self._rollout = rollout
        self._timer: Event | None = None
        self._timeout: Event | None = None
        self.group = group
        self.plan = plan
        self.index = index
        self.instance = instance
        self.is_playing = False
        self.sent_s = 0.0
        self.num_retries = 0
        self._forget()

    def _forget(self) -> None:
        self.turn: Turn | None = None
        self.turn_index = 0
        self.num_tokens = 0.0
        self.slot_s = 0.0
        self.oldest: PolicyVersion | None = None

    def begin(self) -> None:
        """It has a place."""
        self._timeout = self._rollout.events.after(self._rollout.episode_timeout_s, self._time_is_up)
        self._ask()

    def cancel(self) -> None:
        """End it; what it has is thrown away."""
        self._stop()
        self.group.worker.leave(self)

    def truncate(self) -> None:
        """End it now: its whole turns are graded; without any it is `aborted`, and cannot be judged."""
        if self.turn_index == len(self.plan.work):
            return
        self._stop()
        if self.turn_index > 0:
            self._grade()
        else:
            self.group.worker.leave(self)
            self.group.failed(self)

    def _ask(self) -> None:
        work, num_tokens = self.plan.work[self.turn_index], self.plan.num_tokens[self.turn_index]
        self.turn = Turn(work=work, num_tokens=num_tokens, priority=self.group.admission.version, on_end=self._turn_ended)
        self._rollout.submit(self)

    def _turn_ended(self, turn: Turn) -> None:
        self._rollout.answered(self)
        if not turn.is_whole:
            self._rollout.submit(self)  # given back: it goes on with what it has as its prompt
            return
        self.slot_s += turn.seconds
        self.num_tokens += turn.num_tokens
        if turn.oldest is not None:
            self.oldest = turn.oldest if self.oldest is None else min(self.oldest, turn.oldest)
        self.turn = None
        self.turn_index += 1
        if self.turn_index < len(self.plan.work):
            self._timer = self._rollout.events.after(self.plan.tools_s[self.turn_index - 1], self._ask)
        else:
            self._grade()

    def _grade(self) -> None:
        self.turn_index = len(self.plan.work)
        if self._timeout is not None:
            self._timeout.cancel()
        self._timer = self._rollout.events.after(self.plan.reward_s, self._graded)

    def _graded(self) -> None:
        self._timer = None
        if self._rollout.fails(self):
            self._fail()
            return
        self.group.worker.leave(self)
        self.group.judged(self)

    def _time_is_up(self) -> None:
        """Most of the time went to the engines (tools have limits of their own), which says nothing about the policy."""
        self._stop()
        self._fail()

    def _fail(self) -> None:
        """`infra_error`: played again, at the end of the queue for places, as often as it may be."""
        worker = self.group.worker
        worker.leave(self)
        self._rollout.counts["infra_error"] += 1
        if self.num_retries < self._rollout.max_episode_retries and not self.group.is_truncated:
            self.num_retries += 1
            self._forget()
            worker.enter(self)
        else:
            self.group.failed(self)

    def _stop(self) -> None:
        if self.turn is not None:
            self._rollout.withdraw(self)
            self.turn = None
        for event in (self._timer, self._timeout):
            if event is not None:
                event.cancel()


class GroupPlay:
    """The members of one group, and how many of them are needed."""

    def __init__(self, rollout: Rollout, admission: Admission, plans: Sequence[EpisodePlan]) -> None:
        self.admission = admission
        self.is_truncated = False
        self.worker: AgentWorker = rollout.least_loaded_worker()
        self._rollout = rollout
        self._plans = plans
        self._open: dict[int, EpisodePlay] = {}
        self._judged: list[EpisodePlay] = []

    def begin(self) -> None:
        """All members ask for a place."""
        self.worker.groups[self.admission.group] = self
        members = [
            EpisodePlay(self._rollout, self, plan, index=index, instance=instance)
            for index, (plan, instance) in enumerate(zip(self._plans, self.admission.instances, strict=True))
        ]
        self._open = {play.index: play for play in members}
        self._rollout.counts["issued"] += len(members)
        for play in members:
            self.worker.enter(play)

    def begin_again(self) -> None:
        """Its worker died: another one plays it, from the start."""
        self.cancel()
        self._judged = []
        self.worker = self._rollout.least_loaded_worker()
        self.begin()

    @property
    def num_open(self) -> int:
        """Members that have not ended."""
        return len(self._open)

    def cancel(self) -> None:
        """End all members that have not ended."""
        self._cancel_open()
        del self.worker.groups[self.admission.group]

    def truncate(self) -> None:
        """End all members with what they have; none is played again."""
        self.is_truncated = True
        for play in list(self._open.values()):
            play.truncate()

    def move(self, instance: int) -> None:
        """Play on elsewhere; what a turn has so far goes along."""
        for play in self._open.values():
            if play.instance == instance:
                continue
            if play.turn is not None:
                self._rollout.withdraw(play)
            play.instance = instance
            if play.turn is not None:
                self._rollout.submit(play)

    def members_with(self, turns: Set[Turn]) -> list[EpisodePlay]:
        """Members whose turn is one of `turns`."""
        return [play for play in self._open.values() if play.turn in turns]

    def judged(self, play: EpisodePlay) -> None:
        """A member has its reward."""
        self._rollout.counts["judged"] += 1
        del self._open[play.index]
        self._judged.append(play)
        self._end_if_enough()

    def failed(self, play: EpisodePlay) -> None:
        """A member can never be judged."""
        self._rollout.counts["given up"] += 1
        del self._open[play.index]
        self._end_if_enough()

    def _end_if_enough(self) -> None:
        kept = self._judged
        if len(kept) < self._rollout.num_needed and self._open:
            return
        self._cancel_open()
        del self.worker.groups[self.admission.group]
        versions = [play.oldest for play in kept if play.oldest is not None]
        self._rollout.end(
            GroupEnd(
                group=self.admission.group,
                num_judged=len(kept),
                oldest=min(versions, default=None),
                num_tokens=sum(play.num_tokens for play in kept),
                slot_s=sum(play.slot_s for play in kept),
            )
        )

    def _cancel_open(self) -> None:
        late, self._open = list(self._open.values()), {}
        self._rollout.counts["cancelled"] += len(late)
        for play in late:
            play.cancel()


class Rollout:
    """All agent workers, and their way to the instances."""

    def __init__(
        self,
        events: EventQueue,
        instances: Sequence[Instance],
        *,
        num_workers: int,
        episodes_per_worker: int,
        num_needed: int,
        episode_timeout_s: float,
        request_timeout_s: float,
        max_episode_retries: int,
        failing_share: float,
        seed: int,
        on_end: Callable[[GroupEnd], None],
    ) -> None:
        """`num_needed` members of a group are kept; `failing_share` of the episodes end `infra_error` after they were played.

        `counts` is of episodes: every one that was issued is judged, cancelled, given up or open; `infra_error` counts failed plays.
        """
        self.events = events
        self.num_needed = num_needed
        self.episode_timeout_s = episode_timeout_s
        self.max_episode_retries = max_episode_retries
        self.counts: Counter[str] = Counter()
        self.num_late_turns = 0
        """Answered after more than `request_timeout_s`, or not whole until then."""
        self.groups: dict[GroupUid, GroupPlay] = {}
        self.workers = [AgentWorker(episodes_per_worker) for _ in range(num_workers)]
        self._instances = instances
        self._request_timeout_s = request_timeout_s
        self._failing_share = failing_share
        self._failures = rng_of(seed, "failing episodes")
        self._on_end = on_end
        self._homeless: list[EpisodePlay] = []

    @property
    def num_open(self) -> int:
        """Episodes that have not ended."""
        return sum(group.num_open for group in self.groups.values())

    def play(self, admission: Admission, plans: Sequence[EpisodePlan]) -> None:
        """Play a group; `on_end` is called unless it is cancelled."""
        group = GroupPlay(self, admission, plans)
        self.groups[admission.group] = group
        group.begin()

    def cancel(self, group: GroupUid) -> None:
        """End a group that nobody wants any more."""
        self.groups.pop(group).cancel()

    def end(self, end: GroupEnd) -> None:
        """A group has come to its own end."""
        del self.groups[end.group]
        self._on_end(end)

    def submit(self, play: EpisodePlay) -> None:
        """Send a turn to the episode's instance, to another where that one is down, or keep it until one is up."""
        assert play.turn is not None
        play.sent_s = self.events.now_s
        if not self._instances[play.instance].is_up:
            up = [index for index, instance in enumerate(self._instances) if instance.is_up]
            if not up:
                self._homeless.append(play)
                return
            play.instance = min(up, key=lambda index: self._instances[index].num_running + self._instances[index].num_waiting)
        self._instances[play.instance].submit(play.turn)

    def withdraw(self, play: EpisodePlay) -> None:
        """Take a turn back from wherever it is."""
        assert play.turn is not None
        if play in self._homeless:
            self._homeless.remove(play)
        else:
            self._instances[play.instance].give_back(play.turn)
            self.answered(play)

    def answered(self, play: EpisodePlay) -> None:
        """A turn came back from its instance, whole or not."""
        self.num_late_turns += self.events.now_s - play.sent_s > self._request_timeout_s

    def instance_died(self, index: int) -> None:
        """Its turns are sent again, with the parts that were given back before."""
        lost = set(self._instances[index].die())
        for group in self.groups.values():
            for play in group.members_with(lost):
                assert play.turn is not None
                if play.turn.work == play.plan.work[play.turn_index]:
                    play.turn.oldest = None  # no part of it was
                self.submit(play)

    def instance_is_up(self) -> None:
        """Turns that found no instance go to it."""
        waiting, self._homeless = self._homeless, []
        for play in waiting:
            self.submit(play)

    def worker_died(self, worker: AgentWorker) -> None:
        """Its groups are played by others; where there are none they wait until it is back."""
        worker.is_up = False
        for group in list(worker.groups.values()):
            group.begin_again()

    def least_loaded_worker(self) -> AgentWorker:
        """The one that plays the fewest groups."""
        up = [worker for worker in self.workers if worker.is_up] or self.workers
        return min(up, key=lambda worker: len(worker.groups))

    def fails(self, play: EpisodePlay) -> bool:
        """Whether an episode that was played ends `infra_error`."""
        return self._failing_share > 0 and self._failures.random() < self._failing_share
