"""The generated tasks are right, reproducible and split for good."""

import ast
import operator

import pytest

from psrl.datasets.generators import build_generator
from psrl.datasets.generators.arithmetic import evaluate
from psrl.errors import ConfigError
from psrl.types import Role

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def python_says(node):
    """What Python's own parser makes of an expression of +, - and *."""
    if isinstance(node, ast.Constant):
        return node.value
    return OPERATIONS[type(node.op)](python_says(node.left), python_says(node.right))


def test_answers_are_those_of_python():
    for task in build_generator("arithmetic").train_tasks(500, seed=3):
        assert task.ground_truth == str(python_says(ast.parse(task.extra_info["expression"], mode="eval").body))


def test_products_come_before_sums_and_sums_from_the_left():
    assert evaluate([2, 3, 4], ["+", "*"]) == 14
    assert evaluate([9, 5, 3], ["-", "-"]) == 1
    assert evaluate([9, 5, 3], ["-", "*"]) == -6


def test_training_and_validation_never_share_a_prompt_whatever_the_seeds():
    generator = build_generator("arithmetic")
    train = {task.prompt[-1].content for seed in range(5) for task in generator.train_tasks(2000, seed=seed)}
    val = {task.prompt[-1].content for seed in range(5) for task in generator.val_tasks(200, seed=seed)}
    shown = {each.messages[1].content for each in generator.demonstrations(5000, seed=1)}
    assert not val & (train | shown)


def test_a_long_validation_expression_is_trained_on_in_no_wording():
    generator = build_generator("arithmetic")
    val = {task.extra_info["expression"] for task in generator.val_tasks(500, seed=1) if task.data_source == "arithmetic/long"}
    train = {task.extra_info["expression"] for task in generator.train_tasks(20000, seed=1)}
    assert len(val) > 300
    assert not val & train


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others():
    first, again, other = (build_generator("arithmetic").train_tasks(50, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_validation_tasks_are_all_different_and_of_both_kinds():
    val = build_generator("arithmetic").val_tasks(128, seed=1)
    assert len({task.prompt for task in val}) == 128
    easy = sum(task.data_source == "arithmetic/easy" for task in val)
    assert 20 <= easy <= 60


def test_demonstrations_hold_right_broken_and_missing_calls_and_end_with_an_answer():
    demonstrations = build_generator("arithmetic").demonstrations(3000, seed=1)
    texts = ["\n".join(message.content for message in each.messages) for each in demonstrations]
    assert all(each.messages[-1].role is Role.ASSISTANT and r"\boxed{" in each.messages[-1].content for each in demonstrations)
    lazy = [text for text in texts[-300:] if "<tool_call>" not in text]
    assert len(lazy) > 150
    assert any("NameError" in text for text in texts)
    assert any("SyntaxError" in text for text in texts)
    assert sum(not each.tools for each in demonstrations) > 200
    assert all("<tool_call>" not in text for each, text in zip(demonstrations, texts, strict=True) if not each.tools)


def test_an_unknown_generator_is_refused():
    with pytest.raises(ConfigError, match="arithmetic"):
        build_generator("geometry")
