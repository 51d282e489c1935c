"""What is packed into fields comes out again, whatever the lengths, wherever it lies in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psrl.data_plane import COLUMN_NAMES, COLUMNS
from psrl.data_plane.fields import DTYPES, FIELDS, fields_with, packed, unpacked
from psrl.errors import DataPlaneError


def row(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    return {
        column.name: torch.randn(num_tokens, generator=generator)
        if column.dtype == "float32"
        else torch.randint(-100, 100, (num_tokens,), generator=generator, dtype=DTYPES[column.dtype])
        for column in COLUMNS
    }


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5), st.integers(0, 9), st.sets(st.sampled_from(COLUMN_NAMES), min_size=1))
def test_each_column_of_each_row_comes_back_as_it_was(lengths, before, names):
    rows = [row(length) for length in lengths]
    of_rows = [packed(each) for each in rows]
    flat = {
        field: torch.cat([torch.zeros(before, dtype=torch.uint8), *(of_row[field] for of_row in of_rows)]) for field in fields_with(names)
    }
    parts = {field: flat[field][before:].split([len(of_row[field]) for of_row in of_rows]) for field in flat}
    for index, each in enumerate(rows):
        found = unpacked({field: parts[field][index] for field in parts}, names)
        assert set(found) == names
        assert all(found[name].dtype is each[name].dtype and torch.equal(found[name], each[name]) for name in names)


def test_every_column_is_in_one_field_and_estimators_need_not_fetch_ids():
    assert sorted(column.name for columns in FIELDS.values() for column in columns) == sorted(COLUMN_NAMES)
    assert fields_with(("loss_mask", "rewards", "turn_indices")) == ["credit"]


def test_a_column_of_another_dtype_or_name_is_refused():
    with pytest.raises(AssertionError, match=r"rewards is torch\.float64, not float32"):
        packed({**row(3), "rewards": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(DataPlaneError, match="price"):
        fields_with(["rewards", "price"])
