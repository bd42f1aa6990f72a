"""The criterion of the ghost modes, and what is between the model and its losses."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.grad_sample.factors import wide
from opacus_ext.grad_sample.modes.clipped_loss import ClippedLoss, refuse_reduced
from opacus_ext.grad_sample.samplewise.batch import LeaveRun
from opacus_ext.grad_sample.samplewise.scan import Samples
from opacus_ext.grad_sample.samplewise.walk import close
from opacus_ext.refused import Refused

# Criteria beside torch's own that are known to treat samples independently.
INDEPENDENT: Set[type] = set()


def is_independent(criterion: Any) -> bool:
    """Whether it is known to treat samples independently, without a reduction."""
    kind = type(criterion)
    of_torch = kind.__module__ == nn.modules.loss.__name__
    # The one that is given a function of the user's.
    return kind in INDEPENDENT or (
        of_torch and kind is not nn.TripletMarginWithDistanceLoss
    )


def _broadcasts(criterion: Any) -> bool:
    """Whether outputs and targets of other shapes would meet those of other samples."""
    of_torch = type(criterion).__module__ == nn.modules.loss.__name__
    return of_torch and type(criterion) is not nn.CTCLoss  # where T comes first


class ClippedCriterion(DPLossFastGradientClipping):
    """
    A criterion whose loss clips per sample.

    It is called with its ``reduction`` set to "none": torch's own criteria for the
    batch, any other for each sample as a batch of one. What has more dims ``[B, ...]``
    is reduced per sample, by mean or sum as ``loss_reduction`` says. Outputs and
    targets of flattened tokens ``[B * T]`` need ``shape=[B, T]``, as in Opacus;
    positions at ``ignore_index`` do not count then.

    The first call for each kind of arguments compares a criterion's values with what
    it gives for the batch, and the first ``backward()`` after it the gradients of each
    sample's loss with those of all.

    Raises:
        Refused: if a sample's loss depends on other samples
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._by_vmap: Dict[tuple, bool] = {}  # of each kind that has been compared
        self._shared: Dict[tuple, Set[int]] = {}  # arguments that are no batch

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> ClippedLoss:
        call = _Call(self.criterion, args, kwargs, shape, self._shared)
        first = call.kind not in self._by_vmap and call.size > 1
        before, self.criterion.reduction = self.criterion.reduction, "none"
        try:
            if is_independent(self.criterion):
                losses, vmap = self.criterion(*args, **kwargs), True
                if first and _broadcasts(self.criterion):
                    with torch.no_grad():
                        self._compare(call, call.by_sample(True)[0])
            else:
                losses, vmap = call.by_sample(self._by_vmap.get(call.kind, True))
                if first:
                    self._compare(call, losses)
        finally:
            self.criterion.reduction = before
        losses = self._one_a_sample(losses, call)
        if first:
            self.module.new_criterion = True  # to be looked at with less in memory
            self._by_vmap[call.kind] = vmap
        return ClippedLoss(self.module, self.optimizer, losses, self.loss_reduction)

    def _one_a_sample(self, losses: torch.Tensor, call: "_Call") -> torch.Tensor:
        mean, shape = self.loss_reduction == "mean", call.shape
        if shape is not None and losses.shape[:1].numel() == shape.numel():
            losses = losses.view(*shape, *losses.shape[1:])
        if losses.dim() < 2:
            return losses
        losses = losses.flatten(1)
        if not mean:
            return losses.sum(1)
        ignored = getattr(self.criterion, "ignore_index", None)
        if shape is not None and ignored is not None and call.target is not None:
            counts = (call.target.view(len(losses), -1) != ignored).sum(1)
            return losses.sum(1) / counts.clamp(min=1)
        return losses.mean(1)

    @torch.no_grad()
    def _compare(self, call: "_Call", losses: torch.Tensor) -> None:
        """With what the criterion gives for the batch."""
        losses = losses.detach()
        with torch.random.fork_rng(
            [losses.device] if losses.device.type == "cuda" else []
        ):
            whole, again = call.whole(), call.whole()
        if not close(whole, again):
            return  # it draws random numbers
        name = getattr(self.criterion, "__name__", type(self.criterion).__name__)
        if not whole.dim():
            mine = self._one_a_sample(losses, call)
            mine = mine.mean() if self.loss_reduction == "mean" else mine.sum()
            if not close(mine, whole):
                raise _mixing_error(
                    name,
                    f"it gives {float(whole):.6g} for the batch, and the "
                    f"{self.loss_reduction} of what it gives for each sample alone is "
                    f"{float(mine):.6g}.",
                )
            return
        if whole.numel() != losses.numel():
            raise _mixing_error(
                name,
                f"it gives shape {tuple(whole.shape)} for the batch, and "
                f"{tuple(losses.shape)} for all samples, each by itself.",
            )
        mine = losses.reshape(whole.shape)
        if not close(mine, whole):
            b = int((mine - whole).abs().nan_to_num(0).argmax())
            raise _mixing_error(
                name,
                f"a loss is {float(whole.flatten()[b]):.6g} in the batch of "
                f"{call.size}, and {float(mine.flatten()[b]):.6g} for the sample "
                "alone.",
            )


def _mixing_error(name: str, found: str) -> Refused:
    return Refused(
        f"The criterion {name} mixes samples: {found} What depends on the batch (its "
        "largest loss, class weights counted in it, negatives from other samples, a "
        "mean over all of its tokens) is not private.",
        parameter="criterion",
        remedy="Compute the loss of each sample from that sample alone.",
    )


class _Call:
    """
    One call of a criterion.

    Args:
        shape: ``[B, T]`` where tokens are flattened
        shared: by kind the arguments that are known to be no batch, though they may
            once have as many rows
    """

    def __init__(
        self,
        criterion: Callable,
        args: tuple,
        kwargs: dict,
        shape: Any,
        shared: Dict[tuple, Set[int]],
    ):
        self.criterion, self.args, self.kwargs = criterion, args, kwargs
        self.shape = None if shape is None else torch.Size(shape[:2])
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        self.target = target if isinstance(target, torch.Tensor) else None
        self.leaves, self.spec = tree_flatten((args, kwargs))
        rows = [len(x) for x in self.leaves if isinstance(x, torch.Tensor) and x.dim()]
        self.rows = self.shape.numel() if self.shape else rows[0] if rows else 0
        self.size = self.shape[0] if self.shape else self.rows
        self.kind = (str(self.spec), shape is None) + tuple(
            (x.dim(), x.dtype) if isinstance(x, torch.Tensor) else type(x)
            for x in self.leaves
        )
        self.shared = shared.setdefault(self.kind, set())
        self.shared.update(
            i
            for i, x in enumerate(self.leaves)
            if isinstance(x, torch.Tensor) and x.dim() and len(x) != self.rows
        )

    def whole(self) -> torch.Tensor:
        """What it gives for the batch."""
        return self.criterion(*self.args, **self.kwargs)

    def by_sample(self, vmap: bool) -> Tuple[torch.Tensor, bool]:
        """
        What it gives for each sample, ``[B, ...]``, and whether by vmap.

        Args:
            vmap: whether vmap is tried
        """
        at, columns = [], []
        for i, x in enumerate(self.leaves):
            if not isinstance(x, torch.Tensor) or not x.dim():
                continue
            if i not in self.shared:
                at.append(i)
                columns.append(x.unflatten(0, self.shape or (self.rows, 1)))
            elif x.requires_grad and self.size and len(x) % self.size == 0:
                # Of the model's, as a router's logits: rows sample after sample.
                at.append(i)
                columns.append(x.unflatten(0, (self.size, -1)))

        def alone(*sample: torch.Tensor) -> torch.Tensor:
            leaves = list(self.leaves)
            for i, x in zip(at, sample):
                leaves[i] = x
            args, kwargs = tree_unflatten(leaves, self.spec)
            found = self.criterion(*args, **kwargs)
            one = self.shape is None and found.shape[:1] == (1,)
            return found[0] if one else found

        if not self.size:
            return columns[0].new_zeros(0), vmap
        if vmap:
            try:
                return torch.vmap(alone, randomness="different")(*columns), True
            except Exception:  # an op that vmap doesn't know, or a mistake: told below
                pass
        return torch.stack([alone(*sample) for sample in zip(*columns)]), False


# -- between the model and the losses ------------------------------------------------


def _departures(losses: torch.Tensor) -> Iterator[Tuple[GradientEdge, Any, Any]]:
    """Where values that losses depend on have left the model, their runs and dims."""
    todo: List[Any] = [losses.grad_fn]
    seen: Set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        refuse_reduced(function)
        if function is LeaveRun:
            yield GradientEdge(node, 0), node.run, node.dim
        elif function is Samples:
            for i, join in enumerate(node.part.joins):
                dim = None if join.how == "shared" else join.dim or 0
                yield GradientEdge(node, i), node.part.run, dim
        else:
            todo += [parent for parent, _ in node.next_functions]


def runs_of(losses: torch.Tensor) -> List[Any]:
    """The forward passes that losses depend on."""
    runs = {id(run): run for _, run, _ in _departures(losses)}
    return list(runs.values())


def refuse_outside(losses: torch.Tensor, engine: Any) -> None:
    """
    Raises:
        Refused: if losses depend on a parameter beside what the model gave
    """
    params, todo, seen = engine.params, [losses.grad_fn], {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "_forward_cls", None) is LeaveRun:
            continue
        p = getattr(node, "variable", None)
        if p is not None and id(p) in params:
            raise outside_error(p, engine)
        todo += [parent for parent, _ in node.next_functions]


def refuse_other_models(losses: torch.Tensor, runs: List[Any], engine: Any) -> None:
    """
    Raises:
        Refused: if the inputs of forward passes, or losses of their outputs, were
            computed by what is not the private model and is trained, as by a generator
            or a head: it gets no gradient
    """
    of_input = _foreign([node for run in runs for node in run.fed_by], engine)
    found = of_input if of_input is not None else _foreign([losses.grad_fn], engine)
    if found is None:
        return
    what = "its input is" if of_input is not None else "the loss is"
    raise Refused(
        f"{engine.describe()}: {what} computed by another model, with a parameter of "
        f"shape {tuple(found.shape)}, which would get no gradient from the private "
        "loss.",
        module=engine.describe(),
        remedy=(
            "To train the other model (a generator) take a criterion that make_private "
            "was not given; else detach() the input."
            if of_input is not None
            else "Make it part of the model that make_private is given, or freeze it."
        ),
    )


def _foreign(todo: List[Any], engine: Any) -> Optional[nn.Parameter]:
    """A parameter that is met from some nodes, outside of forward passes."""
    seen: Set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen or getattr(node, "_forward_cls", None) in (LeaveRun, Samples):
            continue
        seen.add(node)
        p = getattr(node, "variable", None)
        if isinstance(p, nn.Parameter) and id(p) not in engine.params:
            return p
        todo += [parent for parent, _ in node.next_functions]
    return None


def outside_error(p: nn.Parameter, engine: Any) -> Refused:
    """Of a parameter that is used where its gradient can't be told apart."""
    return Refused(
        f"Parameter {engine.names[p]} of shape {tuple(p.shape)} is also used outside "
        "of the model's forward, for example in the loss itself, where its gradient "
        "can't be told apart by sample.",
        parameter=engine.names[p],
        remedy="Use it inside the forward of the module that owns it; if only a part "
        "of the model is called, make that part private.",
    )


def _weights(losses: torch.Tensor, half: bool) -> Iterator[torch.Tensor]:
    """
    One for each sample, by which multiplication is exact: two samples have the same
    seldom, and in half precision, where powers of two may vanish, not in all of them.
    """
    size = len(losses)
    if half:
        index = torch.arange(size)
        for bit in range((size - 1).bit_length()):
            yield (1 - 2 * (index >> bit & 1)).to(losses)
        return
    generator = torch.Generator().manual_seed(size)
    draw = torch.randperm(max(size, 16), generator=generator)[:size] % 16
    yield (2.0 ** (draw // 2) * (1 - 2 * (draw % 2))).to(losses)


def _digests(
    losses: torch.Tensor, found: List[Tuple[GradientEdge, Any, Any]], weights: Any
) -> List[Optional[torch.Tensor]]:
    """
    Of each departure's gradient, with these weights of the losses, by sample the norm
    and a sum with random weights, ``[2, B]``; the norm alone ``[1]`` where it has no
    samples. Gradients of large outputs are not kept beside each other.
    """
    edges = [edge for edge, _, _ in found]
    grads = torch.autograd.grad(
        [losses], edges, [weights], retain_graph=True, allow_unused=True
    )
    digests: List[Optional[torch.Tensor]] = []
    for (_, run, dim), grad in zip(found, grads):
        if grad is None:
            digests.append(None)
        elif dim is None or not grad.dim():
            digests.append(grad.norm()[None])
        else:
            rows = wide(grad).movedim(dim, 0).unflatten(0, (run.size, -1)).flatten(1)
            generator = torch.Generator().manual_seed(rows.shape[1])
            numbers = torch.randn(rows.shape[1:], generator=generator).to(rows)
            digests.append(torch.stack([rows.norm(dim=1), rows @ numbers]))
    return digests


def refuse_mixing(losses: torch.Tensor) -> bool:
    """
    Returns:
        whether there was anything to be seen

    Raises:
        Refused: if the loss of a sample depends on what the model gave for others
    """
    size = len(losses)
    found = list(_departures(losses)) if losses.dim() == 1 and size > 1 else []
    found = [each for each in found if each[1].batch == size]
    if not found:
        return False
    half = any(run.half for _, run, _ in found)
    plain = _digests(losses, found, torch.ones_like(losses))
    for weights in _weights(losses, half):
        weighted = _digests(losses, found, weights)
        for (_, run, _), a, b in zip(found, plain, weighted):
            if a is not None and not _is_own(run, a, b, weights, half):
                raise Refused(
                    f"{run.engine.describe()}: the loss of a sample depends on the "
                    "outputs of others, between the model and the criterion (a mean "
                    "over the batch, a number of the whole batch, rows in another "
                    "order).",
                    module=run.engine.describe(),
                    remedy=(
                        "Compute the loss of each sample from that sample's outputs "
                        "alone, in the order of the batch."
                    ),
                )
    return True


def _is_own(
    run: Any, a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor, half: bool
) -> bool:
    """Whether each sample's gradient has grown by its own weight, from digests."""
    if len(a) == 1:
        return not (a.any() or b.any())
    if run.rows is not None:
        weights = weights[run.rows.to(weights.device)]
    gap = b / weights.abs().to(b) - a * torch.stack(
        [torch.ones_like(weights), weights.sign()]
    ).to(a)
    largest = torch.stack([a[0], a[1].abs()]).nan_to_num(0, 0, 0)
    bound = (5e-3 if half else 1e-3) * largest.amax(0) + 1e-7 * largest.max()
    return not bool((gap.abs() > bound).any())
