"""The clipped sum of per-sample gradients, as one function."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from opacus_ext.clipping import as_clipping_function, check_parameters
from opacus_ext.grad_sample.core.clip import (
    ClippedSum,
    DenseGrads,
    GroupNorms,
    no_graph,
    refuse_no_graph,
    safe_norms_and_sums,
    sums_by_name,
)
from opacus_ext.grad_sample.core.gradients import (
    gradients_alone,
    no_autocast,
    refuse_hooks,
    unchanged,
)
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import (
    Samples,
    Take,
    in_groups,
    samples_of,
    warn_one_by_one,
)
from opacus_ext.grad_sample.core.sharded import (
    Processes,
    ShardedGroup,
    Shards,
    refuse_tensor_parallel,
    sharded_sum,
)
from opacus_ext.grad_sample.core.traced import TracedGroup
from opacus_ext.grad_sample.factors import dtype_of, tf32_settings
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.refused import Refused

T = torch.Tensor
Loss = Callable[[Any], Any]


class ClippedGrads(NamedTuple):
    """
    The result of :func:`clipped_grads`.

    Attributes:
        sums: by name, the sum over samples of the clipped gradients ``[*shape]``, in
            float32 or wider
        norms: norms of the gradients over all parameters, before clipping ``[B]``
        losses: ``[B]``, detached
        aux: auxiliary values of the loss ``[B, ...]``, detached; None if there are none
    """

    sums: dict[str, T]
    norms: T
    losses: T
    aux: Any = None


class PerSampleGrads(NamedTuple):
    """
    The result of :func:`per_sample_grads`.

    Attributes:
        grads: by name, the gradients ``[B, *shape]``
        losses: ``[B]``, detached
        aux: see :class:`ClippedGrads`
    """

    grads: dict[str, T]
    losses: T
    aux: Any = None


def clipped_grads(
    loss: Loss,
    params: dict[str, T],
    batch: Any,
    clipping: Any,
    *,
    take: Take | None = None,
    microbatch: int | None = None,
    on_nonfinite: str = "drop",
) -> ClippedGrads:
    """
    The sum over samples of their clipped gradients.

    A sample's gradient is that of ``loss(sample)``, where ``sample`` is a batch of one.
    The sum of a batch ``D`` is

        S(D) = sum over i of c(|g_i|) g_i,   g_i = gradient of loss(sample i)

    with the factors ``c`` of the clipping function. Noise is not added.

    **Guarantees.** (1) A sample's term depends on that sample, the parameters and the
    random numbers that the loss draws, and on no other sample, as long as the loss
    reads and writes only its argument, the parameters and constants: samples do not
    interact, under ``torch.vmap`` or one by one. (2) The norm of a term is at most
    ``clipping.sensitivity("add_or_remove_one")``. So up to rounding ``S`` changes by at
    most that if a sample is added or removed, and by ``sensitivity("replace_one")`` if
    one is replaced. Adding Gaussian noise with standard deviation ``sigma *
    sensitivity`` to all of ``sums`` is the Gaussian mechanism with noise multiplier
    sigma. (3) Losses for which this does not hold are refused. ``norms``, ``losses``
    and ``aux`` are not private.

    ================================= ================================================
    case                              result
    ================================= ================================================
    no samples (``B = 0``)            zeros; norms and losses ``[0]``; no aux
    one sample                        the same as a batch of one elsewhere
    a parameter that is not used      its sum is zero
    a frozen parameter                is a constant; it has no entry in ``sums``
    a tensor that is not in params    is a constant, whether it is trainable or not
    one tensor under two names        refused
    a hook on a parameter             refused
    gradients that cancel             exact; norm 0 has the factor ``c(0)``
    a loss without a graph            refused if no sample's loss reaches a parameter
    a gradient that is not finite     the term is zero, the norm infinite, with a
                                      warning; ``on_nonfinite="raise"`` refuses
    a branch on data                  the samples are split by their answers
    an op that vmap can't run         one by one, with one warning that names it
    bfloat16, float16                 norms and sums in float32, so that noise is added
                                      before rounding
    a complex parameter               refused; complex activations are exact
    random numbers in the loss        drawn for each sample separately
    a loss with state                 not detected: the caller is responsible
    a loss of more than one number    refused
    tensors whose first dims differ   refused: close over shared tensors, or ``take``
    numbers, lists, arrays in batch   refused, as above: each sample would see all
    samples that share memory         each has memory of its own
    ================================= ================================================

    Under ``torch.compile(fullgraph=True)`` samples run at once. Branches on data,
    ``take``, ``microbatch`` and ``on_nonfinite="raise"`` are errors there. A gradient
    that is not finite, or whose norm is over 1e19 in float32, is dropped without a
    warning (its norm is infinite). Where a gradient's terms cancel, its norm is a bound
    from above. Each batch size is compiled separately, so draw few sizes.

    Args:
        loss: function of a sample, a tree of tensors ``[1, ...]``. Returns one number,
            or a pair of it and auxiliary values, a tree of tensors
        params: tensors that the loss reads, by name; or a model that ``fully_shard``
            has sharded, for its trainable parameters: the sums are those of all
            processes, of which each has its shards (DTensors); norms and losses are
            those of its own batch
        batch: a tree of tensors ``[B, ...]``; any object with ``take``
        clipping: the bound C of flat clipping, ``min(1, C / |g|)``, or a clipping
            function (clipping.py) of norms ``[B]`` that has ``sensitivity(relation)``
        take: ``take(batch, i)`` returns sample ``i`` as a tree of tensors ``[1, ...]``,
            and raises IndexError behind the last. If it has ``take.size``,
            ``take.size(batch)`` is the number of samples
        microbatch: the most samples that run at once, which bounds memory
        on_nonfinite: "drop" or "raise"

    Raises:
        Refused: see the table; nothing is changed then

    Source: norms and sums from one backward pass are book-keeping (Bu et al. 2023),
    over the ghost norms of factors/.

    Example:
        >>> import torch
        >>> from opacus_ext import clipped_grads
        >>> weight = torch.ones(2, requires_grad=True)
        >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> found = clipped_grads(lambda x: (x @ weight).sum(), {"w": weight}, x, 1.0)
        >>> found.sums["w"], found.norms
        (tensor([0.9000, 1.2000]), tensor([5.0000, 0.5000]))
    """
    shards = _shards_of(params) if isinstance(params, FSDPModule) else None
    every: Mapping[str, T] = params if shards is None else shards.gathered
    trained = _trained(every, microbatch)
    clip = as_clipping_function(clipping)
    check_parameters(clip, len(trained))
    if on_nonfinite not in ("drop", "raise"):
        raise Refused(
            f'on_nonfinite is "drop" or "raise", got {on_nonfinite!r}.',
            parameter="on_nonfinite",
        )
    samples, size = samples_of(batch, take)
    if torch.compiler.is_compiling():
        left_out = take is None, microbatch is None, on_nonfinite == "drop"
        check_compiled(left_out)
        return _clipped_traced(loss, trained, samples[0], clip)
    given = trained, size, clip, on_nonfinite
    total = ClippedSum(*given)
    run = _Losses(loss, trained, total)
    if shards is not None:
        total = sharded_sum(shards.gathered, shards.own, *given[1:])
        run = _ShardedLosses(shards.processes, loss, trained, total)
    losses, aux = run.compute(samples, microbatch)
    if shards is None:  # other processes may have reached some
        refuse_no_graph(total, size)
    return ClippedGrads(total.sums(), total.norms, losses, aux)


def per_sample_grads(
    loss: Loss,
    params: dict[str, T],
    batch: Any,
    *,
    take: Take | None = None,
    microbatch: int | None = None,
) -> PerSampleGrads:
    """
    The gradients of all samples, materialized.

    See :func:`clipped_grads` for the arguments and edge cases. Gradients that are not
    finite are returned unchanged.

    Example:
        >>> import torch
        >>> from opacus_ext import per_sample_grads
        >>> weight = torch.ones(2, requires_grad=True)
        >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> per_sample_grads(lambda x: (x @ weight).sum(), {"w": weight}, x).grads["w"]
        tensor([[3.0000, 4.0000],
                [0.3000, 0.4000]])
    """
    trained = _trained(params, microbatch)
    samples, size = samples_of(batch, take)
    total = DenseGrads(trained, size)
    losses, aux = _Losses(loss, trained, total).compute(samples, microbatch)
    refuse_no_graph(total, size)
    return PerSampleGrads(total.grads(), losses, aux)


def _trained(params: Mapping[str, T], microbatch: int | None) -> dict[str, T]:
    """Returns the trainable parameters; refuses those that can't be clipped."""
    if not isinstance(params, Mapping):
        raise Refused(
            f"params is a dict of names and tensors, got {type(params).__name__}.",
            parameter="params",
            remedy="Give dict(model.named_parameters()).",
        )
    if microbatch is not None and (type(microbatch) is not int or microbatch < 1):
        raise Refused(
            f"microbatch is a number of samples, got {microbatch!r}.",
            parameter="microbatch",
        )
    refuse_tensor_parallel(params)
    trained = {n: p for n, p in params.items() if p.requires_grad}
    names: dict[int, str] = {}
    if not torch.compiler.is_compiling():  # where no hook is called
        refuse_hooks(trained.items())
    for name, p in trained.items():
        if names.setdefault(id(p), name) != name:
            raise Refused(
                f"{names[id(p)]} and {name} are one tensor, whose gradient would be "
                "clipped and released twice.",
                parameter=name,
                remedy="Leave one of the names out: dict(model.named_parameters()) has "
                "each tensor once.",
            )
        if p.is_complex() or not p.is_leaf:
            raise Refused(
                f"{name} is {'complex' if p.is_complex() else 'no leaf'}.",
                parameter=name,
                remedy="Give the leaves that it is computed from, all of them real.",
            )
    if not trained:
        raise Refused(
            "No parameter requires a gradient.",
            parameter="params",
            remedy="Give dict(model.named_parameters()) of a model that is not frozen.",
        )
    return trained


class _Losses:
    """The losses of one call, whose gradients are added to ``total``."""

    group: Callable[..., SampleGroup] = SampleGroup

    def __init__(
        self, loss: Loss, params: dict[str, T], total: ClippedSum | DenseGrads
    ):
        self.loss, self.total = loss, total
        self.names, self.params = list(params), list(params.values())
        # By group: indices, losses with auxiliary values, and the tree of these.
        self._groups: list[tuple[T | None, list[T], Any]] = []

    def compute(self, samples: list[Samples], microbatch: int | None) -> tuple[T, Any]:
        """Returns losses ``[B]`` and auxiliary values ``[B, ...]``."""
        code = getattr(self.loss, "__code__", type(self.loss))
        alone = _alone.setdefault(self.params[0], set())

        def warn(reason: str) -> None:
            alone.add(code)
            warn_one_by_one("The loss", reason)

        way: dict = dict(microbatch=microbatch, one_by_one=code in alone, warn=warn)
        with unchanged(self.params):
            self.run(samples, **way)
        if not self._groups:
            first = self.params[0]
            return torch.zeros(0, dtype=first.dtype, device=first.device), None
        kinds = [(spec, [x.shape[1:] for x in xs]) for _, xs, spec in self._groups]
        if any(kind != kinds[0] for kind in kinds):
            raise Refused(
                "The auxiliary values of some samples have another structure or shape "
                "than those of others.",
                parameter="loss",
                remedy="Return the same from each sample, padded if need be.",
            )
        rows, found, specs = zip(*self._groups)
        whole = list(found[0])
        if rows[0] is not None:
            order = torch.cat([x.cpu() for x in rows]).argsort()
            whole = [torch.cat(xs)[order.to(xs[0].device)] for xs in zip(*found)]
        return whole[0], tree_unflatten(whole[1:], specs[0]) if whole[1:] else None

    def run(self, samples: list[Samples], **way: Any) -> None:
        """Runs all samples in groups."""
        in_groups(samples, self.at_once, self.one, **way)

    def at_once(self, samples: Samples) -> None:
        """Runs samples under vmap."""
        group = self.group(self.params, samples.size)
        with torch.enable_grad(), group.level:
            sample = samples.tree(group.wrap)
            found, spec = _loss_and_aux(group.watch(partial(self.loss, sample)))
            losses, *aux = map(group.inner, found)
            del sample, found
        with no_autocast():
            self.add_group(samples, group, losses)
        self._keep(samples.rows, [losses, *aux], spec)

    def one(self, samples: Samples, i: int) -> None:
        """Runs one sample by plain autograd."""
        rows = torch.arange(samples.size) if samples.rows is None else samples.rows
        with torch.enable_grad():
            found, spec = _loss_and_aux(self.loss(samples.alone(i)))
        with no_autocast():
            self.add_one(rows[i : i + 1], found[0])
        self._keep(rows[i : i + 1], [x[None] for x in found], spec)

    def add_group(self, samples: Samples, group: SampleGroup, losses: T) -> None:
        """Adds the gradients of a group."""
        ones = torch.ones_like(losses)
        self.total.add_group(samples.rows, group, [losses], [ones], self.params)

    def add_one(self, row: T, loss: T) -> None:
        """Adds the gradient of one sample."""
        given = [loss], [torch.ones_like(loss)], self.params, self.names
        self.total.add_one(int(row), gradients_alone(*given))

    def _keep(self, rows: T | None, found: list[T], spec: Any) -> None:
        self._groups.append((rows, [x.detach() for x in found], spec))


class _ShardedLosses(_Losses):
    """The losses of one call in one of several processes, which have shards."""

    def __init__(self, processes: Processes, *given: Any):
        super().__init__(*given)
        self.processes = processes
        self.group = partial(ShardedGroup, processes)

    def run(self, samples: list[Samples], **way: Any) -> None:
        """Runs all samples in rounds of all processes."""
        if way.pop("microbatch") is not None or not samples:
            raise Refused(
                "clipped_grads of a model sharded by fully_shard takes no microbatch=, "
                "and no batch without samples from take=.",
                parameter="microbatch",
                remedy="Leave it out; tensors [0, ...] are a batch without samples.",
            )
        self.loss = partial(self.processes.forward, self.loss)
        self.processes.run(samples, self.at_once, self.one, **way)

    def _keep(self, rows: T | None, *given: Any) -> None:
        if rows is None or int(rows[0]) >= 0:
            super()._keep(rows, *given)


_shards: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _shards_of(module: Any) -> Shards:
    """Returns the shards of a model, the same in each call."""
    if module not in _shards:
        _shards[module] = Shards(module)
    return _shards[module]


def _clipped_traced(
    loss: Loss, params: dict[str, T], samples: Samples, clipping: Callable[[T], T]
) -> ClippedGrads:
    """Computes :func:`clipped_grads` in compiled code."""
    values, size = list(params.values()), samples.size
    if not size:  # a program of its own: torch.vmap needs samples
        norms = values[0].new_zeros(0, dtype=dtype_of(values[0].dtype))
        sums = sums_by_name(params, [None] * len(values))
        return ClippedGrads(sums, norms, values[0].new_zeros(0))
    specs = []

    def call(sample: Any) -> list[T]:
        found, spec = _loss_and_aux(loss(sample))
        specs.append(spec)
        return found

    first = TracedGroup(values, size)
    with torch.enable_grad():
        first.run(call, samples)
    check_compiled(reached=len(first.uses) > 0)

    def total(slots: list[T]) -> tuple[T, Any]:
        group = TracedGroup(values, size)
        (losses, *aux), kept = group.run(call, samples, slots)
        if group.signature() != first.signature():
            raise NotAtOnce("a loss that uses parameters differently in each call")
        return losses.sum(), (losses, aux, kept)

    with torch.no_grad():
        grad = torch.func.grad(total, has_aux=True)
        grads, (losses, aux, kept) = grad(first.make_slots())
        group = GroupNorms(values, size, getattr(clipping, "per_parameter", False))
        # Autocast, in which the loss may run, would round norms and sums.
        with torch.autocast(values[0].device.type, enabled=False):
            group.finish(first.collect(kept, grads, size))
            norms, clipped = safe_norms_and_sums(group, clipping)
        norms = norms.norm(dim=0) if norms.dim() > 1 else norms
    found = tree_unflatten(aux, specs[0]) if aux else None
    return ClippedGrads(sums_by_name(params, clipped), norms, losses, found)


@torch.compiler.assume_constant_result  # runs while code is compiled, as it is
def check_compiled(left_out: Sequence[bool] = (), reached: bool = True) -> None:
    """
    Refuses what compiled code can't do: arguments that are not left out, TF32, which it
    can't leave, and a loss without a graph.
    """
    arguments = "take", "microbatch", 'on_nonfinite="raise"'
    for name, is_left_out in zip(arguments, left_out):
        if not is_left_out:
            raise Refused(
                f"{name} can't be compiled.",
                parameter=name.partition("=")[0],
                remedy="Leave it out, or call clipped_grads in eager code.",
            )
    if tf32_settings():
        raise Refused(
            "A compiled step would round norms and clipped sums to TF32.",
            parameter="set_float32_matmul_precision",
            remedy='Call torch.set_float32_matmul_precision("highest") before.',
        )
    if not reached:
        raise no_graph()


# By the first parameter: losses that vmap can't run.
_alone = WeakIdKeyDictionary()


def _loss_and_aux(found: Any) -> tuple[list[T], Any]:
    """Returns the loss of a sample with auxiliary tensors, and the tree of these."""
    loss, aux = found if isinstance(found, tuple) and len(found) == 2 else (found, ())
    what = type(loss).__name__
    if isinstance(loss, T):
        kind = "complex numbers of shape" if loss.is_complex() else "shape"
        what = f"{kind} {tuple(loss.shape)}"
    if not isinstance(loss, T) or loss.numel() != 1 or loss.is_complex():
        raise Refused(
            f"The loss of a sample is one real number, got {what}.",
            parameter="loss",
            remedy="Reduce it over the sample, by mean() or sum().",
        )
    leaves, spec = tree_flatten(() if aux is None else aux)
    return [loss.reshape(()), *map(_auxiliary, leaves)], spec


def _auxiliary(x: Any) -> T:
    """Returns an auxiliary value as a tensor."""
    numbers = isinstance(x, (int, float, complex, np.ndarray, np.generic))
    if numbers and not isinstance(x, (str, bytes)):
        with suppress(TypeError, ValueError):  # an array of objects
            return torch.as_tensor(x)
    if isinstance(x, T) and x.layout is torch.strided and not x.is_nested:
        return x
    what = f"{x.layout} tensor" if isinstance(x, T) else type(x).__name__
    raise Refused(
        f"An auxiliary value of the loss is of type {what}.",
        parameter="loss",
        remedy="Return dense tensors or numbers, or close over what is neither.",
    )
