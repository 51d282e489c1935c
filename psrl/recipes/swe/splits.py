"""Which problems are kept, and which of them are held out. Depends on the ids and the seed alone, never on the order of the rows."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from psrl.types import SweProblem


def balanced_subset(problems: Sequence[SweProblem], count: int, *, seed: int) -> list[SweProblem]:
    """At most `count` problems, taken in turns from the repositories, so that none has more than one above another that still has any.

    Example:
        5 of a (9 problems), b (2) and c (1) -> 2, 2 and 1.
    """
    by_repo = _by_repo(problems, seed)
    turns = [(turn, _drawn(repo, seed), problem) for repo, members in by_repo.items() for turn, problem in enumerate(members)]
    kept = {problem.instance_id for _, _, problem in sorted(turns, key=lambda entry: entry[:2])[:count]}
    return [problem for problem in problems if problem.instance_id in kept]


def split_problems(
    problems: Sequence[SweProblem], test_share: float, *, seed: int, by: str = "repo"
) -> tuple[list[SweProblem], list[SweProblem]]:
    """(training, test).

    By `repo`, whole repositories are held out, in a drawn order, until `test_share` of the problems is reached, and one is always left
    to train on (unless the share is 1): what is learnt of a project does not help on its own held-out problems. With one repository, or
    by `instance`, each problem is drawn by itself, and at least one is held out where there are two and the share is not 0.
    """
    if test_share in (0, 1):
        return (list(problems), []) if test_share == 0 else ([], list(problems))
    wanted = max(1, round(test_share * len(problems))) if len(problems) > 1 else 0
    by_repo = _by_repo(problems, seed)
    held_out: set[str] = set()
    if by == "instance" or len(by_repo) == 1:
        drawn = sorted(problems, key=lambda problem: _drawn(problem.instance_id, seed))
        held_out = {problem.instance_id for problem in drawn[:wanted]}
    else:
        for repo in sorted(by_repo, key=lambda repo: _drawn(repo, seed))[:-1]:
            if len(held_out) >= wanted:
                break
            held_out |= {problem.instance_id for problem in by_repo[repo]}
    train = [problem for problem in problems if problem.instance_id not in held_out]
    return train, [problem for problem in problems if problem.instance_id in held_out]


def _by_repo(problems: Sequence[SweProblem], seed: int) -> dict[str, list[SweProblem]]:
    """Each repository's problems in their drawn order."""
    found: defaultdict[str, list[SweProblem]] = defaultdict(list)
    for problem in sorted(problems, key=lambda problem: _drawn(problem.instance_id, seed)):
        found[problem.repo].append(problem)
    return dict(found)


def _drawn(name: str, seed: int) -> str:
    """A place in a random order that belongs to the name."""
    return hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).hexdigest()
