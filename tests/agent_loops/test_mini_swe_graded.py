"""The whole path of an episode: the agent's process, its sandbox, what it hands in, and a fresh sandbox that grades it."""

import asyncio

import pytest
from calc_project import BROKEN, TEXT_YAML
from mini_swe_kit import GOLD_TURNS, MEND, NULL_TURNS, block, play_episode, sandboxes, write_yaml

from psrl.config.reward import RewardConfig
from psrl.rewards.base import ScorerParts
from psrl.rewards.execution_scorer import ExecutionScorer
from psrl.types import Outcome

SETTINGS = {"packages": ["pytest"]}
EVERYWHERE = "\n".join(["cat > calc.py <<'END'", BROKEN.replace("a - b", "a + b + 0"), "END"])
CHEAT = "printf 'import pytest\\n' > conftest.py; rm -r tests; mkdir tests; echo 'def test_adds(): pass' > tests/test_calc.py"

# (turns, outcome, accuracy)
EPISODES = {
    "gold": (GOLD_TURNS, Outcome.FINISHED, 1.0),
    "null": (NULL_TURNS, Outcome.FINISHED, 0.0),
    "mended in another way": ([block(EVERYWHERE), *GOLD_TURNS[2:]], Outcome.FINISHED, 1.0),
    "mended, then lost at a limit": ([block(MEND), block("true"), block("true")], Outcome.MAX_TURNS, 1.0),
    "rewrote the tests": ([block(CHEAT), *GOLD_TURNS[2:]], Outcome.FINISHED, 0.0),
}


@pytest.mark.parametrize("name", EPISODES)
def test_gold_scores_one_and_null_scores_zero_through_the_whole_path(tmp_path, name):
    turns, outcome, accuracy = EPISODES[name]

    async def run():
        places, _ = sandboxes(**SETTINGS)
        scorer = ExecutionScorer(ScorerParts(reward=RewardConfig(name="execution"), sandboxes=places))
        try:
            path = write_yaml(tmp_path, TEXT_YAML)
            return await play_episode(path, turns, scorer, settings=SETTINGS, max_turns=3)
        finally:
            await scorer.close()

    episode = asyncio.run(asyncio.wait_for(run(), 120))
    assert (episode.result.outcome, episode.result.error) == (outcome, None)
    assert episode.score.accuracy == accuracy
    assert (episode.score.reward == 1.0) is (accuracy == 1.0)
