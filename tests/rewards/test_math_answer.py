"""Boxes are found and answers normalised as a reader would."""

import pytest

from psrl.rewards.math_answer import last_boxed, normalise, same_plain_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"The answer is \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"First \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{7} and much text after it" + " word" * 500, "7"),
        (r"\boxed{7}, or rather \boxed{8", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{}", ""),
        ("no box, 42", None),
        (r"\boxed{42", None),
        (r"\boxed 42", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_counts(text, expected):
    assert last_boxed(text) == expected


def test_a_hundred_thousand_open_boxes_are_read_quickly():
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert last_boxed(r"\boxed{" * 100_000 + "7}") == "7"


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (" 42", "42", True),
        ("42.0", "42", True),
        ("+42", "42", True),
        ("1,234", "1234", True),
        ("$42$", "42", True),
        (r"42\%", "42", True),
        (r"\text{42}", "42", True),
        ("42.", "42", True),
        (r"\frac12", r"\frac{1}{2}", True),
        (r"\dfrac{1}{2}", "0.5", True),
        (r"\frac{3}{6}", r"\frac12", True),
        ("\u22127", "-7", True),
        ("045", "45", True),
        ("41", "42", False),
        ("42", "-42", False),
        ("", "42", False),
        ("1234", "12,34", None),
        (r"\sqrt{4}", "2", None),
        ("x + 1", "1 + x", None),
        (r"\frac{1}{0}", "1", None),
    ],
)
def test_plain_answers_are_decided_and_the_rest_is_left_to_mathematics(answer, truth, expected):
    assert same_plain_answer(answer, truth) is expected


def test_two_empty_answers_are_not_right():
    assert same_plain_answer("", "") is False


def test_numbers_too_long_to_convert_are_left_to_mathematics():
    assert same_plain_answer("1" * 5000, "2" * 5000) is None
    assert same_plain_answer("1" * 5000, "1" * 5000) is True


def test_normalising_keeps_a_fraction_of_two_digit_numbers():
    assert normalise(r"\frac{12}{34}") == r"\frac{12}{34}"
