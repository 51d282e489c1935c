"""Whether what a policy wrote reaches the network while it is graded: only where the run and the row both say so."""

import asyncio
import socket
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


@pytest.mark.parametrize(("run", "row", "is_reached"), [(False, True, False), (True, False, False), (True, True, True)])
def test_a_patch_reaches_the_network_only_where_run_and_row_allow_it(run, row, is_reached):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = ("127.0.0.1", listener.getsockname()[1])
        call = f"import socket\ntry:\n    socket.create_connection({address}, 2).close()\nexcept OSError:\n    pass\n"
        patch = edit({"shop/cart.py": call + MENDED})
        the_task = task(extra_info={SWE_KEY: replace(problem(), allow_network=row).to_row()})
        the_result = replace(result("done"), submission=Submission(exit_status="Submitted", patch=patch))

        async def score():
            parts = ScorerParts(reward=RewardConfig(name="execution"), sandboxes=BackendSandboxes(SANDBOX), allow_network=run)
            scorer = build_scorer(parts)
            try:
                return await scorer.score(the_task, the_result)
            finally:
                await scorer.close()

        assert asyncio.run(score()).accuracy == 1.0
        try:
            listener.accept()[0].close()
            reached = True
        except BlockingIOError:
            reached = False
    assert reached == is_reached
