"""An agent worker on virtual time: so many episodes at once, the others wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from psrl.types import GroupUid

if TYPE_CHECKING:
    from psrl.simulation.rollout import EpisodePlay, GroupPlay


class AgentWorker:
    """Places for episodes, taken in order of arrival."""

    def __init__(self, num_places: int) -> None:
        self.is_up = True
        self.groups: dict[GroupUid, GroupPlay] = {}
        self._num_free = num_places
        self._waiting: deque[EpisodePlay] = deque()

    def enter(self, play: EpisodePlay) -> None:
        """Begin the episode as soon as there is a place."""
        self._waiting.append(play)
        self._fill()

    def come_up(self) -> None:
        """Restarted."""
        self.is_up = True
        self._fill()

    def leave(self, play: EpisodePlay) -> None:
        """The episode has ended, begun or not."""
        if play.is_playing:
            play.is_playing = False
            self._num_free += 1
            self._fill()
        else:
            self._waiting.remove(play)

    def _fill(self) -> None:
        while self.is_up and self._num_free > 0 and self._waiting:
            self._num_free -= 1
            play = self._waiting.popleft()
            play.is_playing = True
            play.begin()
