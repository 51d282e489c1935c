"""The order of tasks depends on data, seed and position only."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.data import DataConfig, GeneratorConfig
from psrl.datasets.source import SourceReport, TaskSource, build_source, fingerprint_of, uids_given
from psrl.errors import CheckpointError, ConfigError
from psrl.types import Message, Role, Task, TaskUid

REPORT = SourceReport(num_train=0, num_val=0, bad_row_counts={}, num_overlong=0)


def tasks(count):
    prompt = (Message(role=Role.USER, content="?"),)
    return [Task(uid=TaskUid(str(row)), prompt=prompt, data_source="test", extra_info={"row": row}) for row in range(count)]


def source(count=10, *, shuffle=True, seed=1, num_val=0):
    return TaskSource(tasks(count), tasks(num_val), shuffle=shuffle, seed=seed, report=REPORT)


def uids(some):
    return [task.uid for task in some]


def test_every_epoch_gives_every_row_once_in_another_order():
    given_tasks = source(10).next_tasks(30)
    epochs = [[task.extra_info["row"] for task in given_tasks[start : start + 10]] for start in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_uids_name_epoch_and_row_and_never_repeat():
    given_tasks = source(4).next_tasks(12)
    assert len(set(uids(given_tasks))) == 12
    assert all(task.uid == f"train-{index // 4}-{task.extra_info['row']}" for index, task in enumerate(given_tasks))


def test_without_shuffling_rows_come_in_the_order_of_the_files():
    assert uids(source(3, shuffle=False).next_tasks(5)) == ["train-0-0", "train-0-1", "train-0-2", "train-1-0", "train-1-1"]


def test_the_seed_decides_the_order():
    assert uids(source(20, seed=1).next_tasks(20)) == uids(source(20, seed=1).next_tasks(20))
    assert uids(source(20, seed=1).next_tasks(20)) != uids(source(20, seed=2).next_tasks(20))


@given(count=st.integers(1, 12), before=st.lists(st.integers(0, 9), max_size=5), after=st.integers(1, 30), shuffle=st.booleans())
def test_the_order_survives_a_resume_at_any_place(count, before, after, shuffle):
    unbroken, resumed = source(count, shuffle=shuffle), source(count, shuffle=shuffle)
    for size in before:
        unbroken.next_tasks(size)
    resumed.load_state_dict(unbroken.state_dict())
    assert uids(resumed.next_tasks(after)) == uids(unbroken.next_tasks(after))


def test_other_tasks_of_the_same_number_are_refused_wherever_they_lie():
    moved = source(10)
    moved.load_state_dict(source(10).state_dict())
    changed = tasks(10)
    changed[3] = dataclasses.replace(changed[3], ground_truth="4")
    other = TaskSource(changed, [], shuffle=True, seed=1, report=REPORT)
    with pytest.raises(ConfigError, match="not those of the checkpoint"):
        other.load_state_dict(source(10).state_dict())
    assert fingerprint_of(tasks(10)) != fingerprint_of(tasks(10)[::-1]), "their order counts"


@given(count=st.integers(1, 8), num_given=st.integers(0, 30), shuffle=st.booleans())
def test_a_task_is_found_by_its_uid_and_a_state_says_which_were_given(count, num_given, shuffle):
    it = source(count, shuffle=shuffle)
    some = it.next_tasks(num_given)
    state = json.loads(json.dumps(it.state_dict()))
    assert uids_given(state) == uids(some)
    assert [it.task_of(task.uid) for task in some] == some
    assert it.state_dict() == state, "looking a task up takes none"


@pytest.mark.parametrize("uid", ["train-0-10", "val-0-1", "train-0", "", "train-0-1-e0"])
def test_a_uid_that_is_no_task_is_an_error_that_names_it(uid):
    with pytest.raises(CheckpointError, match=f"{uid} is none of the 10 training tasks"):
        source(10).task_of(uid)


@pytest.mark.parametrize("other", [source(11), source(10, seed=2), source(10, shuffle=False)])
def test_the_place_in_another_order_is_refused(other):
    with pytest.raises(ConfigError, match="resume with the data settings of the run"):
        other.load_state_dict(source(10).state_dict())


def test_validation_tasks_are_always_the_same():
    it = source(3, num_val=2)
    it.next_tasks(5)
    assert uids(it.validation_tasks()) == uids(it.validation_tasks()) == ["val-0-0", "val-0-1"]


def generated(**settings):
    generator = GeneratorConfig(name="arithmetic", num_train=50, num_val=20)
    return DataConfig(generator=generator, **settings)


def question_length(task):
    return len(task.prompt[-1].content)


def test_too_long_prompts_refuse_the_start():
    with pytest.raises(ConfigError, match=r"the prompt of \S+ has \d+ tokens") as caught:
        build_source(generated(max_prompt_length=15), prompt_tokens=question_length)
    assert "filter_overlong_prompts=true" in str(caught.value)


def test_too_long_prompts_are_left_out_and_counted_where_asked_for():
    whole = build_source(generated(), prompt_tokens=question_length)
    short = build_source(generated(max_prompt_length=15, filter_overlong_prompts=True), prompt_tokens=question_length)
    kept = [task for task in whole.next_tasks(50) if question_length(task) <= 15]
    assert short.report.num_train == len(kept) > 0
    assert short.report.num_overlong == 70 - short.report.num_train - short.report.num_val
    assert {task.prompt for task in short.next_tasks(len(kept))} == {task.prompt for task in kept}


def test_nothing_is_trained_on_when_every_prompt_is_too_long():
    with pytest.raises(ConfigError, match="leaves no training task"):
        build_source(generated(max_prompt_length=1, filter_overlong_prompts=True), prompt_tokens=question_length)


def test_the_number_of_validation_tasks_can_be_bounded():
    it = build_source(generated(val_max_samples=5), prompt_tokens=question_length)
    assert len(it.validation_tasks()) == it.report.num_val == 5


def test_bad_rows_of_both_partitions_count_together_and_the_fix_allows_all_of_them(tmp_path):
    good = {"prompt": [{"role": "user", "content": "Hi"}]}
    files = {}
    for name, num_bad in (("train", 2), ("val", 3)):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in [good, *[{"prompt": []}] * num_bad]))

    def build(max_bad_rows):
        data = DataConfig(train_files=[str(files["train"])], val_files=[str(files["val"])], max_bad_rows=max_bad_rows)
        return build_source(data, prompt_tokens=question_length)

    with pytest.raises(ConfigError, match=r"3 of 4 rows cannot be used, beside 2 .*max_bad_rows=5 to leave them out"):
        build(4)
    assert build(5).report.bad_row_counts == {"no_prompt": 5}


@pytest.mark.parametrize("data", [DataConfig(), DataConfig(train_files=["a.jsonl"], generator=GeneratorConfig(name="arithmetic"))])
def test_exactly_one_source_of_tasks_is_needed(data):
    with pytest.raises(ConfigError, match="exactly one"):
        build_source(data, prompt_tokens=question_length)
