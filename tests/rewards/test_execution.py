"""`reward.name=execution`: the table of rewards, the scorer's ends, and what is an error and no verdict."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from episodes import result, task
from hypothesis import given
from hypothesis import strategies as st
from swe.shop_project import FAIL_TO_PASS, MENDED, PASS_TO_PASS, SANDBOX, edit, grade, problem, with_grader

from psrl.config.reward import ExecutionConfig, RewardConfig
from psrl.config.sandbox import SandboxConfig
from psrl.errors import EnvironmentFault, RewardError, SandboxError
from psrl.rewards.base import ScorerParts
from psrl.rewards.execution import ProjectGrader
from psrl.rewards.execution_scorer import MODES, REWARD_TABLE, reward_of, reward_table_markdown, score_of
from psrl.rewards.scorer import build_scorer
from psrl.sandbox import BackendSandboxes
from psrl.swe.verdict import GradeCause, GradeReport
from psrl.types import Outcome, Submission
from psrl.types.swe import SWE_KEY

PAGE = Path(__file__).parents[2] / "docs" / "swe_grading.md"


@st.composite
def counted(draw, causes):
    """A verdict with any numbers that it can have."""
    f2p, p2p = draw(st.integers(0, 50)), draw(st.integers(0, 50))
    return GradeReport(
        cause=draw(st.sampled_from(causes)),
        f2p_passed=draw(st.integers(0, f2p)), f2p_total=f2p, p2p_passed=draw(st.integers(0, p2p)), p2p_total=p2p,
    )  # fmt: skip


ATTEMPTS = [GradeCause.TESTS_FAILED, GradeCause.NO_REPORT, GradeCause.TIMEOUT]
NOTHING = GradeReport(cause=GradeCause.EMPTY_PATCH)


@pytest.mark.parametrize("mode", MODES)
@given(counted(ATTEMPTS), counted([GradeCause.TAMPERED, GradeCause.FORBIDDEN_PATH]), counted([GradeCause.RESOLVED]))
def test_an_honest_attempt_is_never_worse_than_nothing_and_a_violation_is_worst(mode, attempt, violation, resolved):
    unusable = GradeReport(cause=GradeCause.INVALID_PATCH)
    assert reward_of(resolved, mode) == 1.0
    assert reward_of(resolved, mode) > reward_of(attempt, mode) >= reward_of(unusable, mode) >= reward_of(NOTHING, mode)
    assert reward_of(NOTHING, mode) > reward_of(violation, mode) == -1.0


def test_every_cause_has_one_row_of_the_table():
    causes = [cause for row in REWARD_TABLE for cause in row.causes]
    assert sorted(causes) == sorted(GradeCause)


# By hand: 0.9 * 8/10; 0.9 * 2/4; 0.05 + 0.2 * 2/4. With one broken: 0.9 * 7/10; 0; 0.05 + 0.1 - 0.05.
@pytest.mark.parametrize(
    ("p2p_passed", "rewards"),
    [(6, {"binary": 0, "test_ratio": 0.72, "partial_credit": 0.45, "shaped": 0.15}),
     (5, {"binary": 0, "test_ratio": 0.63, "partial_credit": 0, "shaped": 0.1})],
)  # fmt: skip
def test_shares_of_tests_are_counted_as_the_table_says(p2p_passed, rewards):
    report = GradeReport(cause=GradeCause.TESTS_FAILED, f2p_passed=2, f2p_total=4, p2p_passed=p2p_passed, p2p_total=6)
    assert {mode: pytest.approx(reward_of(report, mode)) for mode in MODES} == rewards
    assert {score_of(report, mode).accuracy for mode in MODES} == {0.0}


def test_the_page_prints_the_table_of_the_code():
    assert reward_table_markdown() in PAGE.read_text()


def score(the_result, the_problem, sandbox=SANDBOX, **execution):
    async def run():
        reward = RewardConfig(name="execution", execution=ExecutionConfig(**execution))
        scorer = build_scorer(ScorerParts(reward=reward, sandboxes=BackendSandboxes(sandbox)))
        try:
            return await scorer.score(task(extra_info={SWE_KEY: the_problem.to_row()}), the_result)
        finally:
            await scorer.close()

    return asyncio.run(run())


def left(patch, status="Submitted", outcome=Outcome.FINISHED):
    return replace(result("done", outcome=outcome), submission=Submission(exit_status=status, patch=patch))


def test_a_mended_project_is_worth_one_and_counts_as_solved():
    scored = score(left(problem().gold_patch), problem(), mode="shaped")
    assert (scored.reward, scored.accuracy, scored.parts["f2p_share"], scored.parts["p2p_share"]) == (1.0, 1.0, 1.0, 1.0)
    assert scored.parts["cause/resolved"] == 1.0
    assert 0 < scored.parts["tests_s"] <= scored.parts["grading_s"]


def test_a_mend_that_was_left_at_a_limit_counts_as_well():
    scored = score(left(problem().gold_patch, status="LimitsExceeded", outcome=Outcome.MAX_TURNS), problem())
    assert (scored.reward, scored.accuracy) == (1.0, 1.0)


def test_half_a_mend_gets_its_share_and_is_not_solved():
    half = MENDED.replace("(100 - discount) / 100", "(100 - discount) / 100 if discount == 10 else sum(prices) / max(1, discount)")
    scored = score(left(edit({"shop/cart.py": half})), problem(), mode="test_ratio")
    # test_discount, test_sum, test_cheapest and test_slug pass, [half off] and [free] do not: 0.9 * 4/6.
    assert scored.accuracy == 0.0
    assert scored.reward == pytest.approx(0.9 * 4 / 6)


@pytest.mark.parametrize("the_result", [left(""), result("I give up"), left("", status="LimitsExceeded", outcome=Outcome.TIMEOUT)])
def test_an_end_without_a_change_is_worth_nothing_and_needs_no_sandbox(the_result):
    scored = score(the_result, problem(), SandboxConfig(backend="process"))
    assert (scored.reward, scored.accuracy, scored.parts["grading_s"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("outcome", [Outcome.INFRA_ERROR, Outcome.ABORTED])
def test_what_says_nothing_about_the_policy_has_no_reward(outcome):
    assert score(replace(left(problem().gold_patch), outcome=outcome), problem()).reward is None


def test_a_sandbox_without_pytest_is_an_error_that_says_what_to_do():
    with pytest.raises(RewardError, match=r"No module named 'pytest'.*sandbox\.packages"):
        score(left(problem().gold_patch), problem(), SandboxConfig())


def test_a_project_that_cannot_be_made_ready_is_an_error_and_no_verdict():
    with pytest.raises(RewardError, match="set-up command 'exit 3'"):
        score(left(problem().gold_patch), problem(setup_commands=("exit 3",)))


def test_a_test_patch_that_does_not_apply_is_an_error_and_no_verdict():
    with pytest.raises(EnvironmentFault, match="test patch of shop-1"):
        grade(problem().gold_patch, problem(test_patch=edit({"tests/test_cart.py": "x\n"}).replace("test_sum", "test_sun")))


def test_a_grading_that_takes_too_long_is_an_error_and_no_verdict():
    with pytest.raises(RewardError, match=r"raise reward\.execution\.timeout_s"):
        grade(problem().gold_patch, problem(setup_commands=("sleep 60",)), timeout_s=0.5)


class LosesSandboxes(BackendSandboxes):
    """Loses the first ones in the middle of a grading, as a machine that is out of memory does."""

    num_lost = 1
    num_made = 0

    def make(self, spec):
        sandbox = super().make(spec)
        self.num_made += 1
        if self.num_made <= self.num_lost:
            run = sandbox.run

            async def lost(argv, **options):
                if argv[-1].endswith("base") or "apply" in argv:
                    raise SandboxError("the guest is gone")
                return await run(argv, **options)

            sandbox.run = lost
        return sandbox


@pytest.mark.parametrize(("num_lost", "cause"), [(1, "resolved"), (2, None)])
def test_a_lost_sandbox_is_replaced_once(num_lost, cause):
    async def run():
        sandboxes = LosesSandboxes(SANDBOX)
        sandboxes.num_lost = num_lost
        return await ProjectGrader(sandboxes, ExecutionConfig()).grade(problem(), problem().gold_patch)

    if cause is None:
        with pytest.raises(SandboxError):
            asyncio.run(run())
    else:
        assert asyncio.run(run()).cause == cause


def test_equal_patches_of_a_group_are_graded_once_although_they_come_at_once():
    async def use(grader):
        return await asyncio.gather(*(grader.grade(problem(), problem().gold_patch) for _ in range(4)))

    first, *others = with_grader(use)
    assert first.cause is GradeCause.RESOLVED
    assert all(other is first for other in others)


class CountsSandboxes(BackendSandboxes):
    """Says when the first one is made."""

    def __init__(self, config):
        super().__init__(config)
        self.num_made, self.has_made = 0, asyncio.Event()

    def make(self, spec):
        self.num_made += 1
        self.has_made.set()
        return super().make(spec)


def test_whoever_waits_for_an_equal_patch_gets_its_verdict_although_its_first_grading_was_cancelled():
    async def run():
        sandboxes = CountsSandboxes(SANDBOX)
        grader = ProjectGrader(sandboxes, ExecutionConfig(), num_concurrent=2)
        first, second, third, fourth = (asyncio.create_task(grader.grade(problem(), problem().gold_patch)) for _ in range(4))
        await sandboxes.has_made.wait()
        first.cancel()
        third.cancel()
        ends = await asyncio.gather(first, second, third, fourth, return_exceptions=True)
        again = await grader.grade(problem(), problem().gold_patch)
        return ends, again, sandboxes.num_made

    (first, second, third, fourth), again, num_made = asyncio.run(run())
    assert isinstance(first, asyncio.CancelledError) and isinstance(third, asyncio.CancelledError)
    assert second.is_resolved and second is fourth is again
    assert num_made == 2


def test_those_who_wait_share_a_time_out_and_who_comes_later_asks_again():
    row = problem(test_command="sleep 60", log_parser="parse_log_pytest", timeout_s=0.3)

    async def run():
        sandboxes = CountsSandboxes(SANDBOX)
        grader = ProjectGrader(sandboxes, ExecutionConfig(), num_concurrent=2)
        reports = await asyncio.gather(*(grader.grade(row, row.gold_patch) for _ in range(3)))
        num_made = sandboxes.num_made
        return [*reports, await grader.grade(row, row.gold_patch)], num_made, sandboxes.num_made

    reports, num_first, num_all = asyncio.run(run())
    assert [report.cause for report in reports] == [GradeCause.TIMEOUT] * 4
    assert (num_first, num_all) == (1, 2)


def test_an_error_of_the_first_grading_is_not_that_of_those_who_wait():
    async def run():
        sandboxes = LosesSandboxes(SANDBOX)
        sandboxes.num_lost = 2
        grader = ProjectGrader(sandboxes, ExecutionConfig())
        return await asyncio.gather(*(grader.grade(problem(), problem().gold_patch) for _ in range(3)), return_exceptions=True)

    first, second, third = asyncio.run(run())
    assert isinstance(first, SandboxError)
    assert second.is_resolved and second is third


def test_a_verdict_is_kept_for_the_same_problem_and_patch_and_for_nothing_else():
    async def use(grader):
        first = await grader.grade(problem(), problem().gold_patch)
        again = await grader.grade(problem(), problem().gold_patch.rstrip("\n"))
        harder = problem(fail_to_pass=(*FAIL_TO_PASS, "tests/test_cart.py::test_no"))
        return first, again, await grader.grade(harder, problem().gold_patch), await grader.grade(problem(), problem().gold_patch)

    first, again, other, anew = with_grader(use, cache_size=1)
    assert first is again
    assert (other.is_resolved, other.failed_tests) == (False, ("tests/test_cart.py::test_no",))
    assert anew is not first and anew.is_resolved


def test_validation_sees_every_test_before_and_after_the_mend():
    async def use(grader):
        open_problem = problem(fail_to_pass=(), pass_to_pass=())
        return await grader.run_tests(open_problem, ""), await grader.run_tests(open_problem, problem().gold_patch)

    before, after = with_grader(use)
    assert {name: str(status) for name, status in before.statuses.items()} == {
        **dict.fromkeys(FAIL_TO_PASS, "failed"),
        **dict.fromkeys(PASS_TO_PASS, "passed"),
    }
    assert {str(status) for status in after.statuses.values()} == {"passed"}
    assert set(before.failures) == set(FAIL_TO_PASS)
    assert "assert 33.0 == 27" in before.failures["tests/test_cart.py::test_discount"]


def test_the_wait_for_a_score_grows_with_the_gradings_that_may_queue():
    reward = RewardConfig(name="execution", num_processes=2, execution=ExecutionConfig(timeout_s=100.0))
    assert reward.score_timeout_s(max_concurrent=5) == 120 + 3 * 100
    assert RewardConfig(name="retool").score_timeout_s(max_concurrent=5) == 120
