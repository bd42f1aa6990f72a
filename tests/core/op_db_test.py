"""Every op that torch tests itself, with the inputs that torch tests it with (op_db).

One argument of an op is a parameter and another a sample, both ways round; in complex
numbers the parameter is real, and cast. An op of one argument is given a sample times a
parameter, and other ops are given one, too: so gradients go through data as well.
"""

import functools
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import pytest
import torch
from torch.utils import _pytree as pytree

from opacus_ext import Refused, clipped_grads, per_sample_grads
from tests.common import Net, assert_same, clipped_sum, norms_of, oracle, run_mode

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]
PARTS = 8  # of all ops, tested beside each other
INPUTS = 3  # of an op
OF_MODES = 2  # cases of an op that are run in each mode
SCALES = 1.0, 0.9, 0.75  # of the samples of a batch, which stay in the op's domain
TINY = 1e-9  # norms of gradients that are zero but for rounding

Grads = Dict[str, torch.Tensor]

# -- what is left out, and why ---------------------------------------------------------

# Ops that draw random numbers: others for each sample, though torch's tests seed each
# call. Of others, the cases with dropout are left out.
RANDOM = """
bernoulli nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d
nn.functional.dropout3d nn.functional.feature_alpha_dropout
nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
nn.functional.rrelu normal pca_lowrank svd_lowrank
"""
# Cases that are refused, as the op writes what the next sample or batch would read.
REFUSED = {
    "_batch_norm_with_update": "running statistics",
    "_native_batch_norm_legit": "running statistics",
    "native_batch_norm": "running statistics",
    "nn.functional.batch_norm": "running statistics",
    "nn.functional.instance_norm": "running statistics",
    "nn.functional.embedding_bag": "max_norm rescales rows of the table in place",
}
# Cases that have no gradient for a sample alone, by what torch says.
NO_GRADIENT = {
    "does not require grad": "of the argument only the shape, dtype or sign is read",
    "is not differentiable with respect to": "targets, weights of classes, statistics",
    "up to multiplication by e": "the phase of a singular vector or eigenvector",
    "setStorage": "the argument is cut from a storage that a sample has not",
    "scale_grad_by_freq not supported": "torch has none for this setting",
    "aten::view_as_real": "of sparse output",
    "does not support automatic differentiation": "of sparse output",
    "output with shape": "in place, where the result is larger",
    "output tensor size": "in place, where the result is larger",
    "2D tensor expected": "in place, where the result is larger",
    "inplace version of": "torch has none for this op in place",
    "In-place abs": "torch has none in place",
}


class Case(NamedTuple):
    """A call of an op: the places of a parameter and of a sample in its arguments."""

    op: Callable
    leaves: List[Any]
    spec: pytree.TreeSpec
    place: Optional[int]  # of the parameter "p"
    of_sample: int
    scaled: bool  # whether the sample is multiplied with a parameter "q" of ones

    def net(self) -> Net:
        """The model that gives the losses of a batch of one sample."""
        made = {}
        if self.place is not None:
            p = self.leaves[self.place]
            made["p"] = (p.real if p.is_complex() else p).clone()
        if self.scaled:
            made["q"] = torch.ones(self.leaves[self.of_sample].shape).double()
        return Net(lambda net, x: self.losses(net, x), **made)

    def losses(self, net: Net, x: torch.Tensor) -> torch.Tensor:
        leaves = list(self.leaves)
        leaves[self.of_sample] = x[0] * net.q.to(x.dtype) if self.scaled else x[0]
        if self.place is not None:
            leaves[self.place] = net.p.to(x.dtype)
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return measure(self.op(first, *args, **kwargs)).reshape(1)

    def batch(self) -> torch.Tensor:
        return torch.stack([self.leaves[self.of_sample] * scale for scale in SCALES])


def measure(found: Any) -> torch.Tensor:
    """A real number that weighs each entry of an op's outputs differently."""
    total = torch.zeros(()).double()
    tensors = [y for y in pytree.tree_leaves(found) if isinstance(y, torch.Tensor)]
    for y in tensors:
        for part in (y.real, y.imag) if y.is_complex() else (y,):
            if part.is_floating_point():
                weights = torch.linspace(0.5, 1.5, part.numel()).double()
                total = 1.5 * total + (weights.view(part.shape) * part).sum()
    return total


def cases_of(info: Any, dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    given = list(info.sample_inputs("cpu", dtype))
    given = [sample for sample in given if not sample.kwargs.get("dropout_p")]
    for sample in given[:: max(1, len(given) // INPUTS)][:INPUTS]:
        tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
        leaves, spec = pytree.tree_flatten(tree)
        places = []
        for i, x in enumerate(leaves):
            dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
            if dense and x.dtype == dtype and x.numel():
                leaves[i] = x.detach().clone()
                places.append(i)
        if len(places) < 2:
            for i in places:
                yield Case(info.op, leaves, spec, None, i, True)
        else:
            for a, b in (places[:2], places[1::-1]):
                yield Case(info.op, leaves, spec, a, b, False)
                yield Case(info.op, leaves, spec, a, b, True)


def in_place(info: Any, dtype: torch.dtype) -> Iterator[Case]:
    """The cases in which an op writes to a sample that was multiplied."""
    op = info.inplace_variant
    for case in cases_of(info, dtype) if op else ():
        if case.scaled and case.of_sample == 0:
            yield case._replace(
                op=lambda x, *args, **kwargs: op(1 * x, *args, **kwargs)
            )


def expected(case: Case) -> Optional[Grads]:
    """The gradients of single samples; None where there is nothing to compare."""
    try:
        grads = oracle(case.net(), case.batch(), lambda net, x: net(x))
    except Exception as error:
        if any(said in str(error) for said in NO_GRADIENT):
            return None
        raise
    norms = norms_of(grads)
    finite = bool(norms.isfinite().all())
    return grads if finite and float(norms.max()) > TINY else None


def check(case: Case, grads: Grads, mode: Optional[str]) -> None:
    norms = norms_of(grads)
    bound = float(norms.max()) * 0.8
    sums = clipped_sum(grads, "flat", bound)
    if mode not in (None, "in place"):
        given = case.net(), case.batch(), lambda net, x: net(x)
        assert_same(run_mode(mode, True, *given, "flat", bound), sums)
        return
    net, batch = case.net(), case.batch()
    params = dict(net.named_parameters())
    dense = per_sample_grads(lambda x: case.losses(net, x), params, batch)
    assert_same(dense.grads, grads)
    found = clipped_grads(lambda x: case.losses(net, x), params, batch, bound)
    assert_same({"norms": found.norms}, {"norms": norms})
    assert_same(found.sums, sums)


@functools.cache
def every_op() -> List[Any]:
    pytest.importorskip("expecttest", reason="torch's tests of its ops need it")
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", [None, "in place", "ghost_bk", "scan"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_ops(dtype, mode, part):
    wrong, compared = [], 0
    for info in every_op()[part::PARTS]:
        fits = info.supports_autograd and dtype in info.supported_dtypes("cpu")
        if not fits or info.name in RANDOM.split():
            continue
        made, most = cases_of(info, dtype), None
        if mode == "in place":
            made = in_place(info, dtype)
        elif mode is not None:
            most = OF_MODES
        for number, case in enumerate(islice(made, most)):
            try:
                grads = expected(case)
                if grads is not None:
                    check(case, grads, mode)
                    compared += 1
            except Exception as error:
                if isinstance(error, Refused) and info.name in REFUSED:
                    continue
                name, kind = f"{info.full_name} {number}", type(error).__name__
                wrong.append(f"{name}, parameter {case.place}: {kind}: {error}")
    assert not wrong, "\n".join(wrong)
    assert compared > 4
