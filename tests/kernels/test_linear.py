"""`x W^T + b` by whichever library: the same numbers but for rounding."""

import pytest
import torch
import torch.nn.functional as F

from psrl.kernels.linear import MIN_PADDED_ROWS, ROW_STEP, linear, padded_rows


@pytest.mark.parametrize("num_rows", [1, 7, 32, 33, 200])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_torchs(num_rows, has_bias, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, 128, dtype=dtype), torch.randn(768, 128, dtype=dtype)
    bias = torch.randn(768, dtype=dtype) if has_bias else None
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_rows_and_columns_that_are_part_of_a_larger_tensor_are_read_where_they_lie():
    torch.manual_seed(0)
    wide, tall = torch.randn(64, 512), torch.randn(2048, 256)
    x, weight = wide[:, 128:384], tall[512:1024]
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight), x.contiguous() @ weight.contiguous().T, rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    torch.manual_seed(0)
    x, weight = torch.randn(96, 256), torch.randn(512, 256)
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight)[:40], linear(x[:40], weight), rtol=1e-5, atol=1e-4)


def test_many_rows_are_rounded_up_and_few_are_not():
    assert [padded_rows(count) for count in (1, MIN_PADDED_ROWS - 1)] == [1, MIN_PADDED_ROWS - 1]
    assert [padded_rows(count) for count in (32, 33, 48, 2047)] == [32, 48, 48, 2048]
    assert all(padded_rows(count) % ROW_STEP == 0 for count in range(MIN_PADDED_ROWS, 300))
