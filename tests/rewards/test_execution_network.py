"""Whether what a policy wrote reaches the network while it is graded: only where the run and the row both say so."""

import asyncio
from dataclasses import replace

import pytest
from episodes import result, task
from swe.shop_project import MENDED, SANDBOX, edit, problem

from psrl.config.reward import RewardConfig
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.sandbox import BackendSandboxes
from psrl.types import Submission
from psrl.types.swe import SWE_KEY


class Recorded(BackendSandboxes):
    """Real ones without a network, since this machine's own is none to give; what was asked is kept."""

    def __init__(self):
        super().__init__(SANDBOX)
        self.asked = set()

    def make(self, spec):
        self.asked.add(spec.limits.allow_network)
        return super().make(spec)


@pytest.mark.parametrize(("run", "row", "is_open"), [(False, True, False), (True, False, False), (True, True, True)])
def test_a_patch_is_graded_with_the_network_only_where_run_and_row_allow_it(run, row, is_open):
    the_task = task(extra_info={SWE_KEY: replace(problem(), allow_network=row).to_row()})
    the_result = replace(result("done"), submission=Submission(exit_status="Submitted", patch=edit({"shop/cart.py": MENDED})))
    sandboxes = Recorded()

    async def score():
        scorer = build_scorer(ScorerParts(reward=RewardConfig(name="execution"), sandboxes=sandboxes, allow_network=run))
        try:
            return await scorer.score(the_task, the_result)
        finally:
            await scorer.close()

    assert asyncio.run(score()).accuracy == 1.0
    assert sandboxes.asked == {is_open}
