"""A grading sandbox may have the network only where the run and the row both say so."""

import asyncio
from dataclasses import replace

import pytest
from episodes import result, task
from swe.shop_project import SANDBOX, problem

from psrl.config.reward import RewardConfig
from psrl.protocols import Sandboxes
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.sandbox import BackendSandboxes
from psrl.types import Submission
from psrl.types.swe import SWE_KEY


class Asked(Sandboxes):
    """Real sandboxes without a network, and what was asked for."""

    def __init__(self):
        self.networks = []

    def make(self, spec):
        self.networks.append(spec.limits.allow_network)
        return BackendSandboxes(SANDBOX).make(replace(spec, limits=replace(spec.limits, allow_network=False)))


@pytest.mark.parametrize(("run", "row"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_patch_is_graded_with_the_network_only_where_run_and_row_allow_it(run, row):
    places = Asked()
    the_task = task(extra_info={SWE_KEY: replace(problem(), allow_network=row).to_row()})
    the_result = replace(result("done"), submission=Submission(exit_status="Submitted", patch=problem().gold_patch))

    async def score():
        scorer = build_scorer(ScorerParts(reward=RewardConfig(name="execution"), sandboxes=places, allow_network=run))
        try:
            return await scorer.score(the_task, the_result)
        finally:
            await scorer.close()

    assert asyncio.run(score()).accuracy == 1.0
    assert places.networks == [run and row]
