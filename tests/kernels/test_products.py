"""Products by whichever library: torch's numbers but for rounding, and the gradients that autograd gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psrl.kernels.products import MAX_PART, MIN_ROWS, Linear, add_product, is_by_openblas, linear, product, use_products


@pytest.fixture(autouse=True, params=[True, False], ids=["openblas", "torch"])
def by_openblas(request, monkeypatch):
    """Both ways on every machine: numpy's products are right wherever it runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("psrl.kernels.products.is_openblas_told", lambda: request.param)
    yield request.param
    torch.set_num_threads(threads)


def exact(a, b):
    return torch.from_numpy(a.double().numpy() @ b.double().numpy())


def test_a_product_of_transposed_views_is_that_of_the_matrices(by_openblas):
    torch.manual_seed(0)
    a, b = torch.randn(70, 33), torch.randn(70, 41)
    assert is_by_openblas(a) == by_openblas
    torch.testing.assert_close(product(a.t(), b).double(), exact(a.t(), b), rtol=1e-5, atol=1e-4)
    rows = torch.zeros(100, 41)
    product(a.t(), b, out=rows[20:53])
    torch.testing.assert_close(rows[20:53].double(), exact(a.t(), b), rtol=1e-5, atol=1e-4)
    assert not rows[:20].any() and not rows[53:].any()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_and_its_gradients_are_those_of_the_definition_in_float64(has_bias):
    torch.manual_seed(0)
    states, weight = torch.randn(2, 40, 32), torch.randn(48, 32)
    bias, grad = torch.randn(48) if has_bias else None, torch.randn(2, 40, 48)
    for numbers, layer in ((torch.float32, linear), (torch.float64, F.linear)):
        inputs = [each.to(numbers).requires_grad_() for each in (states, weight, bias) if each is not None]
        result = layer(*inputs)
        found = [result, *torch.autograd.grad(result, inputs, grad.to(numbers))]
        if numbers == torch.float32:
            ours = found
    with torch.inference_mode():
        ours.append(linear(states, weight, bias))
    for one, other in zip(ours, [*found, found[0]], strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-5, atol=1e-4)


def test_a_weight_that_is_not_trained_has_no_gradient_and_its_states_have():
    states, weight = torch.randn(MIN_ROWS, 8, requires_grad=True), torch.randn(4, 8)
    linear(states, weight).sum().backward()
    torch.testing.assert_close(states.grad, weight.sum(0).expand(MIN_ROWS, 8))


def test_a_sum_grows_by_a_product_in_parts():
    torch.manual_seed(0)
    num_columns = MAX_PART // 2 + 1  # one row at a time
    total, a, b = torch.ones(3, num_columns), torch.randn(7, 3), torch.randn(7, num_columns)
    add_product(total, a.t(), b)
    torch.testing.assert_close(total.double(), 1 + exact(a.t(), b), rtol=1e-5, atol=1e-4)


def test_other_numbers_and_several_threads_are_torchs():
    assert not is_by_openblas(torch.zeros(1, dtype=torch.bfloat16))
    torch.set_num_threads(2)
    assert not is_by_openblas(torch.zeros(1))


def test_layers_of_a_model_keep_their_parameters_and_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2, bias=False)), nn.LayerNorm(2))
    before = dict(model.named_parameters())
    use_products(model)
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [Linear, Linear]
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
