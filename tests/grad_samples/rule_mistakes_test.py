"""Mistakes of those who write a rule: each is told in words that name the rule."""

import pytest
import torch
from torch import nn

from opacus_ext import OneHot, Op, Refused, as_op, clipped_grads, register_rule
from opacus_ext.grad_sample.rules import RULES


def factors(backprops, activations):
    return [(backprops * activations,)]


def rule_of(**fields):
    """Makes a rule of ``scale`` whose Op has other fields than it should."""

    def of_scale(x, weight):
        right = dict(params=(weight,), data=(x,), factors=factors)
        return Op(**{**right, **fields})

    return of_scale


def by(*terms):
    """Makes a function of factors that returns this, whatever it is given."""
    return rule_of(factors=lambda backprops, x: list(terms))


# By name: a rule, and what the error says.
MISTAKES = {
    "no Op": (lambda x, weight: (weight, x), "returned a tuple. Return an opacus_ext"),
    "params": (
        lambda x, weight: rule_of(params=weight)(x, weight),
        "of test.*scale gives a .* as params, a tuple as data.* Give tuples",
    ),
    "data": (
        lambda x, weight: rule_of(data=x)(x, weight),
        "gives a tuple as params, a Tensor as data",
    ),
    "no data": (rule_of(data=(), data_dims=()), "gives no data"),
    "dims of two data": (
        lambda x, weight: rule_of(data=(x, x))(x, weight),
        r"gives data_dims=\(1,\) for 2 data.*data_dims=\(1, 1\)",
    ),
    "a number of dims": (rule_of(data_dims=1), "a int as data_dims"),
    "no factors": (rule_of(factors=lambda backprops, x: None), "returned a NoneType"),
    "a tensor": (
        rule_of(factors=lambda backprops, x: backprops * x),
        "lambda.*, which gives the factors of a rule, returned a Tensor",
    ),
    "no tuple": (
        rule_of(factors=lambda backprops, x: [backprops * x]),
        "a list with a Tensor",
    ),
    "an index": (by(OneHot(torch.zeros(4, 1).long(), 6)), "a list with a OneHot"),
    "one too many": (by((torch.ones(4, 1, 6),), ()), "2 entries for 1 params"),
    "one too few": (
        lambda x, weight: rule_of(params=(weight, weight))(x, weight),
        "factors, which .* returned 1 entries for 2 params",
    ),
    "no rows": (by((torch.ones(4, 6),)), "lambda.* gives wrong factors for a rule"),
    "no samples": (by((torch.ones(1, 1, 6),)), "for a batch of 4"),
    "too wide": (by((torch.ones(4, 1, 7),)), r"of a parameter of shape \(6,\)"),
}


@pytest.fixture
def scale():
    @as_op
    def scale(x, weight):
        return weight * x

    yield scale
    RULES.pop(scale, None)


def step(op, *shapes):
    """Takes the clipped sum of four samples through an op with its parameters."""
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def loss(sample):
        return op(sample, *weights).pow(2).sum()

    return clipped_grads(loss, dict(enumerate(weights)), torch.randn(4, 6), 1.0)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_a_rule(scale, name):
    rule, said = MISTAKES[name]
    register_rule(scale)(rule)
    with pytest.raises(Refused, match=said):
        step(scale, [6])


@as_op
def product(x, weight):
    return x @ weight


def view_product(x, weight):
    return product(x, weight.t())


@pytest.mark.parametrize("op", [product, view_product])
@pytest.mark.parametrize("is_right", [True, False])
def test_factors_are_in_the_order_of_the_axes(op, is_right):
    """Also for a view of a parameter, whose factors are put into another order."""

    @register_rule(product)
    def of_product(x, weight):
        def factors(backprops, x):
            return [(x, backprops) if is_right else (backprops, x)]

        return Op((weight,), (x,), factors)

    shape = [6, 3] if op is product else [3, 6]
    try:
        if is_right:
            step(op, shape)
        else:
            with pytest.raises(Refused, match=r"wrong factors .* \(6, 3\)"):
                step(op, shape)
    finally:
        del RULES[product]


def test_a_parameter_that_is_left_out_needs_no_factors():
    @as_op
    def scale(x, weight, bias=None):
        return weight * x

    register_rule(scale)(lambda x, w, b=None: Op((w, b), (x,), factors))
    try:
        step(scale, [6])
    finally:
        del RULES[scale]


def plain(x, weight):
    return weight * x


@pytest.mark.parametrize(
    "function, said",
    [
        (plain, "plain is no op: .*as_op"),
        (nn.Linear, "Linear is no function.*torch.nn.functional.linear"),
        (nn.Linear(2, 2), "Linear is no function"),
        ("linear", "str is no function"),
    ],
)
def test_what_can_have_no_rule(function, said):
    with pytest.raises(Refused, match=said):
        register_rule(function)


def test_a_rule_with_other_parameters(scale):
    with pytest.raises(Refused, match=r"test_a_rule_\S* can't be called .*positional"):
        register_rule(scale)(lambda x: None)
    assert scale not in RULES
