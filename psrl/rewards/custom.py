"""A user's own reward: `compute_score(data_source, solution_str, ground_truth, extra_info)` from a file, in a child."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from psrl.config.reward import CustomRewardFunctionConfig
from psrl.errors import ConfigError
from psrl.rewards.base import EpisodeScorer, ScorerParts, scorers
from psrl.rewards.graders import GraderLoadError, GraderPool
from psrl.types import LoopResult, Score, Task

ACCURACY_NAMES = ("acc", "accuracy")
"""Keys under which a returned dictionary says whether the task was solved."""
_LAST_TOKEN = re.compile(r"(<\|\w{1,32}\|>|</s>)\Z")
_LONGEST_TOKEN = 36


@scorers.register("custom")
class CustomScorer(EpisodeScorer):
    """The function's number is the reward. `solution_str` is what the policy sampled, turn by turn, without observations."""

    def __init__(self, parts: ScorerParts) -> None:
        """Raises ConfigError where the file or the function is not there."""
        reward, custom = parts.reward, parts.custom
        path = _checked_path(custom)
        self._path, self._name = path, custom.name
        arguments = ("custom", str(path), custom.name)
        self._pool = GraderPool(arguments=arguments, num_processes=reward.num_processes, timeout_s=reward.timeout_s)

    async def judge(self, task: Task, result: LoopResult) -> Score:
        """Call the function in a child."""
        reply = await self._pool.grade(
            {
                "data_source": task.data_source,
                "solution_str": "\n".join(without_end_tokens(text) for text in result.turn_texts),
                "ground_truth": task.ground_truth,
                "extra_info": {**task.extra_info, "num_turns": len(result.turn_texts)},
            }
        )
        reward, parts = float(reply["score"]), dict(reply["parts"])
        given = [parts[name] for name in ACCURACY_NAMES if name in parts]
        return Score(reward=reward, accuracy=given[0] if given else float(reward > 0), parts=parts)

    async def self_test(self) -> None:
        """Load the file in a child; what it raises there is the user's to fix."""
        try:
            await self._pool.preload()
        except GraderLoadError as error:
            raise ConfigError(
                key="custom_reward_function.path", value=str(self._path), rule=str(error), fix=f"make `python {self._path}` run"
            ) from error

    async def close(self) -> None:
        """Kill the children."""
        await self._pool.close()


def without_end_tokens(text: str) -> str:
    r"""A turn without the tokens that end it, which verl's functions do not expect. In time linear in what is dropped: a policy may
    write thousands of such tokens.

    Example:
        without_end_tokens("It is 4.<|im_end|><|endoftext|>\n") is "It is 4.".
    """
    end = whole = len(text.rstrip())
    while (token := _LAST_TOKEN.search(text, max(0, end - _LONGEST_TOKEN), end)) is not None:
        end = token.start()
    return text[:end] if end < whole else text


def _checked_path(custom: CustomRewardFunctionConfig) -> Path:
    """The file, after a look that runs none of it."""

    def refuse(key: str, value: object, rule: str, fix: str) -> ConfigError:
        return ConfigError(key=f"custom_reward_function.{key}", value=value, rule=rule, fix=fix)

    if custom.path is None:
        raise refuse("path", None, "reward.name=custom needs a file", "set custom_reward_function.path to a Python file")
    path = Path(custom.path).expanduser().resolve()
    if not path.is_file():
        raise refuse("path", custom.path, "is no file", "give the path of a Python file")
    try:
        names = _top_level_names(ast.parse(path.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError) as error:
        raise refuse("path", custom.path, f"is no valid Python ({error})", "correct the file") from error
    if custom.name not in names:
        known = ", ".join(sorted(names)) or "nothing"
        raise refuse("name", custom.name, f"{path.name} defines {known}", "name a function of that file")
    return path


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
