"""A tool that never returns costs its own episode, or its agent worker, which is started again; the run goes on."""

import shutil
import time
from pathlib import Path

import pytest
import yaml

from tests.faults import hanging_tools
from tests.faults.faulty_run import END_LIMIT_S, NUM_INJECTIONS, WITHOUT_END, FaultyRun

pytestmark = pytest.mark.slow

QUICK = ("gen_actor_rollout_ref.rollout.agent.step_timeout_s=2", "gen_actor_rollout_ref.rollout.agent.episode_timeout_s=20")
SILENCE_S = 15


def recipe_with_hanging_tool(folder: Path, *, share: float, how: str) -> Path:
    """The tiny recipe, with a tool of which a share of the calls hangs."""
    folder.mkdir()
    shutil.copy(hanging_tools.__file__, folder)
    config = {"share": share, "how": how, "log": str(folder / "hung.txt")}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [{"class_name": "hanging_tools.HangingInterpreter", "config": config}]}))
    recipe = folder / "hanging.yaml"
    rollout = {"multi_turn": {"tool_config_path": str(folder / "tools.yaml")}}
    tree = {"defaults": ["/retool_tiny/config@_global_", "_self_"], "gen_actor_rollout_ref": {"rollout": rollout}}
    recipe.write_text(yaml.safe_dump(tree))
    return recipe


@pytest.mark.parametrize(
    ("how", "share", "settings"),
    [
        ("wait", 0.05, QUICK),
        ("block", 0.02, (*WITHOUT_END, "gen_actor_rollout_ref.rollout.agent.num_workers=2", f"psrl.deadlines.stall_s={SILENCE_S}")),
    ],
)
def test_a_tool_that_never_returns_does_not_hold_the_run(tmp_path, how, share, settings):
    recipe = recipe_with_hanging_tool(tmp_path / "recipe", share=share, how=how)
    hung = recipe.parent / "hung.txt"
    run = FaultyRun(tmp_path, f"tool that never returns ({how}s)", recipe=str(recipe), settings=settings)
    run.begin()
    seen, began = 0, time.monotonic()
    while seen < NUM_INJECTIONS:
        assert run.now.process.poll() is None, f"ended: {run.now.log()}"
        assert time.monotonic() - began < END_LIMIT_S + 20 * NUM_INJECTIONS, f"{seen} calls hung: {run.now.log()}"
        run.moment(0.5)
        now = len(hung.read_text().splitlines()) if hung.exists() else 0
        for number in range(seen + 1, min(now, NUM_INJECTIONS) + 1):
            run.report(number, f"a call hangs {time.monotonic() - began:.1f} s after the first step, at step {run.num_steps()}")
        seen = now
    run.until_steps(3)
    run.stop()
    run.check_record()
    if how == "block":
        assert run.num_deaths("agent worker") > 0
