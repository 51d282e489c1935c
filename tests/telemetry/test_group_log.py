"""`groups.jsonl` proves what became of every group, and finds what went wrong."""

import pytest

from psrl.telemetry.group_log import Fate, GroupFate, GroupLog, check_group_log, read_group_log


def fate(uid, step, *, admitted=None, buffer=None, oldest=None, kind=Fate.TRAINED):
    if kind is Fate.TRAINED:
        buffer = step - 1 if buffer is None else buffer
        admitted = buffer if admitted is None else admitted
    return GroupFate(uid=uid, fate=kind, step=step, admitted_version=admitted, buffer_version=buffer, oldest_version=oldest)


GOOD = [
    fate("a", 1),
    fate("b", 1),
    fate("c", 2, kind=Fate.FILTERED),
    fate("d", 2, admitted=0, oldest=0),
    fate("e", 2, oldest=0),
    fate("f", 2, kind=Fate.SURPLUS),
]


def check(fates, **more):
    return check_group_log(fates, **({"staleness": 1, "groups_per_step": 2} | more))


def test_what_is_written_is_read_back_and_an_unfinished_line_is_not(tmp_path):
    log = GroupLog(tmp_path / "groups.jsonl")
    for each in GOOD:
        log.write(each)
    size = (tmp_path / "groups.jsonl").stat().st_size
    log.write(fate("later", 3))
    log.close()
    with (tmp_path / "groups.jsonl").open("ab") as file:
        file.write(b'{"uid"')
    assert read_group_log(tmp_path / "groups.jsonl") == [*GOOD, fate("later", 3)]
    assert read_group_log(tmp_path / "groups.jsonl", size_bytes=size) == GOOD
    assert read_group_log(tmp_path / "nothing.jsonl") == []


def test_a_good_record_has_nothing_wrong_with_it():
    assert check(GOOD) == []
    assert check(GOOD, given="abcdefgh", unfinished="gh") == []
    assert check([]) == []


@pytest.mark.parametrize(
    ("fates", "named"),
    [
        ([*GOOD, fate("a", 2, kind=Fate.DROPPED)], "1 groups have more than one fate: a"),
        ([*GOOD, fate("g", 2)], "step 2 trained 3 groups, not 2"),
        ([*GOOD, fate("g", 4), fate("h", 4)], "step 3 trained 0 groups, not 2"),
        ([*GOOD, fate("g", 3, buffer=1), fate("h", 3)], "1 groups were trained from another buffer than their step's: g"),
        ([*GOOD, fate("g", 3, admitted=0), fate("h", 3)], "1 groups are more than 1 versions old: g"),
        ([*GOOD, fate("g", 3, oldest=0), fate("h", 3)], "1 groups are more than 1 versions old: g"),
        ([*GOOD, fate("g", 3, admitted=3), fate("h", 3)], "1 groups were admitted after the update that they trained: g"),
    ],
)
def test_what_must_never_happen_is_found(fates, named):
    assert named in check(fates)


@pytest.mark.parametrize(
    ("given", "unfinished", "named"),
    [
        ("abcdefg", "", "1 groups were given and have no fate: g"),
        ("abcde", "", "1 groups have a fate and were never given: f"),
        ("abcdef", "a", "1 groups have a fate and are said to be unfinished: a"),
        ("abcdefghijklm", "", "7 groups were given and have no fate: g, h, i, j, k, ..."),
    ],
)
def test_gaps_and_strangers_are_found_where_the_order_is_known(given, unfinished, named):
    assert check(GOOD, given=given, unfinished=unfinished) == [named]
