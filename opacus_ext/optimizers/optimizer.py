"""DP optimizers that take any clipping function.

``HooksDPOptimizer`` clips the per-sample gradients of mode "hooks";
``GhostDPOptimizer`` takes over gradients that "ghost" and "ghost_bk" have clipped.
"""

from __future__ import annotations

import math
import secrets
import weakref
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    Type,
)

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.optim import Optimizer

from opacus_ext.clipping import CLIPPINGS, Bound, Clipping, ClippingFunction
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.parallel.group import ExpertGroup
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.optimizers.banded import BandedNoise
from opacus_ext.refused import Refused, warn_once
from opacus_ext.secure import SecureSource, gaussian_grid, release

if TYPE_CHECKING:
    _Base = DPOptimizer
else:
    _Base = object  # what is mixed in comes before one of Opacus's

# Entries of what is drawn together: to start kernels takes longer than to run them.
_SMALL = 2**16
# In checkpoints.
_CORRELATED, _NOISE = "opacus_ext_correlated_noise", "opacus_ext_noise_of"


class _ClippingOptimizer(_Base):
    """What both share: the bound of a clipping function and noise to match it."""

    clipping: Clipping = CLIPPINGS["flat"]
    on_nonfinite = "drop"  # or "raise", set by make_private
    rank = 0  # of the process
    correlated: Optional[BandedNoise] = None  # set by make_private
    #: Each has ``observe(norms)``, called with the samples' norms once a logical batch
    #: when its noise was added, and a ``noise_factor`` for the gradients' noise.
    observers: Tuple[Any, ...] = ()
    watch: Optional[Watch] = None  # set by make_private
    #: How many physical batches are drawn before the step of the first, at most.
    ahead = 0
    # While a step is at work, and after one that has failed: the signals that it began
    # with, and whether it was in the middle of a logical batch.
    _unfinished: Optional[Tuple[List[bool], bool]] = None

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:  # asked by torch.amp.GradScaler
        raise Refused(
            "GradScaler scales the loss, so that gradients would be clipped at "
            "another norm, and skips steps by what private data do.",
            remedy=(
                'Use bfloat16 without it; for float16 modes "ghost" and "ghost_bk" '
                "have loss.backward(scale=...)."
            ),
        )

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: Bound,
        expected_batch_size: Optional[int],
        **kwargs: Any,
    ):
        self._bounds: Optional[List[float]] = None
        self._noise_seed = _draw_seed()
        self._noise_of = secrets.randbits(63)  # tells this optimizer's states apart
        self._noise_generators: Dict[torch.device, torch.Generator] = {}
        self._noise_states: Set[int] = set()  # of generators, at earlier steps
        # Of the samples in the sum so far, over all parameters: [B] a physical batch.
        self.norms: List[Optional[torch.Tensor]] = []
        self._clipped_at: Optional[Bound] = None  # the bound of the sum so far
        given = max_grad_norm
        if self.clipping.per_parameter:
            max_grad_norm = self._check_bounds(optimizer, max_grad_norm)
        elif isinstance(max_grad_norm, (list, tuple)) or not max_grad_norm > 0:
            raise Refused(
                f'clipping="{self.clipping.name}" takes one positive max_grad_norm, '
                f"got {given}.",
                parameter="max_grad_norm",
            )
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            **kwargs,
        )

    def _check_bounds(self, optimizer: Optimizer, bounds: Bound) -> float:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        count = sum(p.requires_grad for p in trained)
        if not isinstance(bounds, (list, tuple)) or len(bounds) != count:
            raise Refused(
                f'clipping="{self.clipping.name}" takes max_grad_norm as a list with '
                f"one bound for each of the {count} trainable parameter tensors in the "
                f"optimizer, in its order; got {bounds}.",
                parameter="max_grad_norm",
            )
        if not all(b > 0 for b in bounds):
            raise Refused(
                f"Bounds must be positive, got {bounds}.", parameter="max_grad_norm"
            )
        self._bounds = [float(b) for b in bounds]
        self.max_grad_norms = self._bounds
        return self.clipping.largest_norm(self._bounds)

    @property
    def clipping_bound(self) -> Bound:
        """``max_grad_norm``, as the clipping function takes it."""
        return self.max_grad_norm if self._bounds is None else self._bounds

    @property
    def clipping_function(self) -> ClippingFunction:
        """The clipping function at its bound."""
        return self.clipping.at(self.clipping_bound)

    @property
    def sensitivity(self) -> float:
        """The largest norm of one sample's clipped gradient."""
        return self.clipping_function.sensitivity("add_or_remove_one")

    @property
    def gradient_noise_multiplier(self) -> float:
        """
        The noise multiplier of the gradients: larger than ``noise_multiplier``, which
        is accounted, where an observer releases something beside them.
        """
        multiplier = getattr(self, "_adjusted_noise_multiplier", self.noise_multiplier)
        factors = (each.noise_factor for each in self.observers)
        return multiplier * math.prod(factors, start=1.0)

    def pre_step(self, closure: Optional[Any] = None) -> Optional[float]:
        """
        See ``DPOptimizer``; observers see each logical batch once.

        Raises:
            Refused: if samples could be in the sum twice, or of two logical batches
        """
        self._check_batches()
        noise_state = self._state_of_noise()
        self._unfinished = [*self._step_skip_queue], self._is_last_step_skipped
        goes_on = super().pre_step(closure)
        if noise_state is not None:
            self._noise_states.add(noise_state)
        if goes_on and self.watch is not None:
            self.watch.step(self, self.norms)
        for observer in self.observers if goes_on else ():
            observer.observe(self.norms)
        if not goes_on:
            self._unfinished = None
        return goes_on

    def step(self, closure: Optional[Any] = None) -> Optional[float]:
        """See ``DPOptimizer``; only within it the optimizer that it wraps may step."""
        watch = self.watch
        before = watch is not None and watch.stepping
        try:
            if watch is not None:
                watch.stepping = True
            found = super().step(closure)
            self._unfinished = None
            return found
        finally:
            if watch is not None:
                watch.stepping = before  # it may be within another one's

    def _check_batches(self) -> None:
        """
        Raises:
            Refused: after a step that failed, and if a batch that was drawn has not
                been stepped on
        """
        if self._unfinished is not None:
            raise Refused(
                "The step before this one has failed, and what it has left in the sum "
                "may be there twice.",
                remedy=(
                    "Begin the loader anew: the logical batch was in its middle."
                    if self._unfinished[1]
                    else "Call optimizer.zero_grad() and compute the batch anew."
                ),
            )
        left = len(self._step_skip_queue) - 1 - self.ahead
        if left > 0:
            raise Refused(
                f"{left} of the physical batches that the loader has drawn were left "
                "without optimizer.step(), so that this one would go to the step of "
                "another logical batch.",
                remedy="Step on each, or leave the loop and begin the loader anew. If "
                "something draws batches ahead of the steps, say so: optimizer.ahead "
                "+= 1.",
            )

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """
        Adds a function that is called after each step that counts, behind those that
        there are: the accountant's is one.
        """
        before = self.step_hook

        def both(optimizer: Any) -> None:
            before(optimizer)
            fn(optimizer)

        self.step_hook = fn if before is None else both

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """
        Trains more of the model's parameters, as ``torch.optim.Optimizer``.

        Raises:
            Refused: for a parameter of something else, whose gradients nobody clips
        """
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        known = set() if self.mode is None else set(self.mode._module.parameters())
        for p in given:
            tensor = p[1] if isinstance(p, tuple) else p
            if tensor not in known or self._bounds is not None:
                raise Refused(
                    f"add_param_group() with a parameter of shape {[*tensor.shape]}, "
                    + (
                        "that has no bound in max_grad_norm."
                        if tensor in known
                        else "that is not the private model's."
                    ),
                    remedy="Give make_private a model and an optimizer that have it "
                    "from the beginning; requires_grad_(False) freezes it.",
                )
        self.original_optimizer.add_param_group({**param_group, "params": given})

    def drop_logical_batch(self) -> None:
        """Forgets a logical batch that was left in the middle."""
        left = self._step_skip_queue or self._is_last_step_skipped
        if not left and self._unfinished is None:
            if all(getattr(p, "summed_grad", None) is None for p in self.params):
                return
        self._step_skip_queue.clear()
        self._is_last_step_skipped, self._unfinished = False, None
        self.zero_grad(True)

    # -- noise -------------------------------------------------------------------------

    def mix_noise(self) -> None:
        """
        Begins the noise that is to come with fresh randomness: of a run that goes on
        from a checkpoint, which may have gone on from it before.
        """
        self._noise_seed = secrets.randbits(63)
        self._noise_generators.clear()
        if self.generator is not None and not self.secure_mode:
            self.generator.manual_seed(self._noise_seed)

    def noise_state(self) -> Dict[str, Any]:
        """
        What the noise that is to come is drawn from; whoever has it knows that. In
        secure mode nobody can.
        """
        if self.secure_mode:
            return {}
        given = self.generator
        return {
            "seed": self._noise_seed,
            "generators": {
                str(device): generator.get_state()
                for device, generator in self._noise_generators.items()
            },
            "given": None if given is None else given.get_state(),
        }

    def repeat_noise(self, state: Mapping[str, Any]) -> None:
        """
        Sets what the noise is drawn from. Two runs that go on from one state add the
        same noise: subtracted from each other, their weights have none.

        Args:
            state: of :meth:`noise_state`

        Raises:
            Refused: in secure mode, and for the state of a run in secure mode
        """
        if self.secure_mode or not state:
            raise Refused(
                "Noise in secure mode can't be repeated: nothing of it is kept.",
                parameter="repeat_noise",
                remedy="Leave repeat_noise out, so that noise is drawn afresh.",
            )
        self._noise_seed = state["seed"]
        self._noise_generators = {
            torch.device(name): torch.Generator(name).set_state(generator.cpu())
            for name, generator in state["generators"].items()
        }
        if state["given"] is not None and self.generator is not None:
            self.generator.set_state(state["given"].cpu())

    def _generator_for(self, device: torch.device) -> Any:
        """
        Of the noise alone: what else is drawn, and ``torch.manual_seed`` in the loop,
        do not reach it. In secure mode a :class:`SecureSource`.
        """
        if self.secure_mode:
            return SecureSource()
        if self.generator is not None:
            return self.generator
        if device not in self._noise_generators:
            generator = torch.Generator(device).manual_seed(self._noise_seed)
            self._noise_generators[device] = generator
        return self._noise_generators[device]

    def _state_of_noise(self) -> Optional[int]:
        """
        Of the generator of this step's noise; None if it draws none.

        Raises:
            Refused: if the noise would be that of an earlier step, which can be
                subtracted
        """
        if self.secure_mode or not self.noise_multiplier:
            return None
        if not any(map(self._adds_noise, self.params)):
            return None  # another process draws it
        if self._check_skip_next_step(pop_next=False):
            return None
        generator = self._generator_for(self.params[0].device)
        state = hash(generator.get_state().numpy().tobytes())
        if state in self._noise_states:
            raise Refused(
                "The generator of the noise is in the state of an earlier step, so "
                "that both steps would have the same noise: subtracted from each other "
                "they have none.",
                parameter="noise_generator",
                remedy="Seed it once, before make_private, and not in the loop.",
            )
        return state

    def add_noise(self) -> None:
        """
        Adds noise of std ``gradient_noise_multiplier * sensitivity``; sets ``p.grad``.

        Raises:
            Refused: if the bound has changed since gradients were clipped
        """
        self._check_same_bound()
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        if self.secure_mode and self.noise_multiplier:
            self._release_on_grid()
        else:
            self._add_noise()
        for p in self.params:
            total = p.summed_grad
            self._gather(p, total)
            total = total if total.shape == p.shape else total.view_as(p)
            p.grad = total.to(p.dtype)
            _mark_as_processed(p.summed_grad)

    def _gather(self, p: torch.nn.Parameter, total: torch.Tensor) -> None:
        """Adds what other processes have, in place."""

    def _check_same_bound(self) -> None:
        """That of all samples in the sum, and of the noise, is the same."""
        now = self.clipping_bound
        if self._clipped_at is None:
            self._clipped_at = list(now) if isinstance(now, list) else now
        if self._clipped_at != now:
            raise Refused(
                f"max_grad_norm was {self._clipped_at} when gradients of this step "
                f"were clipped and is {now} now, so that the noise would not fit.",
                parameter="max_grad_norm",
                remedy="Change it between a step that counts and backward().",
            )

    def _release_on_grid(self) -> None:
        """In secure mode: ``p.summed_grad`` with noise, see ``opacus_ext.secure``."""
        entries = sum(p.numel() for p in self.params)
        std, grid = gaussian_grid(
            self.gradient_noise_multiplier, self.sensitivity, entries
        )
        for p in self.params:
            p.summed_grad.copy_(release(p.summed_grad, std, grid))

    def _add_noise(self) -> None:
        multiplier = self.gradient_noise_multiplier
        std, params = multiplier * self.sensitivity, self.params
        given = (p for group in self.param_groups for p in group["params"])
        places = {p: i for i, p in enumerate(given)}
        if self.correlated is not None:
            self.correlated.begin(multiplier, [places[p] for p in params])
        small: Dict[tuple, Tuple[Optional[torch.Generator], list]] = {}
        for p in filter(self._adds_noise, params):
            total, generator = p.summed_grad, self._generator_of(p)
            if total.numel() <= _SMALL:
                kind = total.device, total.dtype, id(generator)
                small.setdefault(kind, (generator, []))[1].append(p)
            else:  # in place: gradients and one noise tensor, as without privacy
                noise = self._row([places[p]], total, total.shape, std, generator)
                total.add_(noise)
        for generator, members in small.values():
            at = [places[p] for p in members]
            totals = [p.summed_grad for p in members]
            sizes = [x.numel() for x in totals]
            noise = self._row(at, totals[0], (sum(sizes),), std, generator)
            each = [x.view_as(y) for x, y in zip(noise.split(sizes), totals)]
            torch._foreach_add_(totals, each)
        if self.correlated is not None:
            self.correlated.taken += 1

    def _row(
        self,
        places: List[int],
        like: torch.Tensor,
        shape: Sequence[int],
        std: float,
        generator: Optional[torch.Generator],
    ) -> torch.Tensor:
        """The noise of this step for the parameters at some places."""
        if self.correlated is None:
            return self._noise(like, shape, std, generator)
        noise = self._noise(like, shape, 1.0, generator)
        row = self.correlated((self.rank, *places), noise)
        return row.mul_(std).to(like.dtype)

    def state_dict(self) -> Dict[str, Any]:
        """The optimizer's, with what correlated noise goes on from."""
        state = {**super().state_dict(), _NOISE: self._noise_of}
        if self.correlated is not None:
            state = {**state, _CORRELATED: self.correlated.state_dict()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """
        Raises:
            Refused: if one of the two runs has correlated noise and the other has not
        """
        state = dict(state_dict)
        noise, own = state.pop(_CORRELATED, None), state.pop(_NOISE, None)
        if (noise is None) != (self.correlated is None):
            raise Refused(
                "The checkpoint is of a run with "
                f"{'independent' if noise is None else 'correlated'} noise, and this "
                "one has the other kind.",
                parameter="noise",
                remedy="Pass make_private the noise that the run began with.",
            )
        super().load_state_dict(state)
        if own != self._noise_of:
            self.mix_noise()
        else:  # Accelerate loads an optimizer's own state, and draws a batch ahead
            self.ahead += 1
        if self.correlated is not None:
            self.correlated.load_state_dict(noise)

    def scale_grad(self) -> None:
        """Divides gradients by the expected batch size, if the loss is a mean."""
        if self.loss_reduction == "mean":
            size = self.expected_batch_size * self.accumulated_iterations
            kinds: Dict[tuple, List[torch.Tensor]] = {}
            for p in self.params:
                kinds.setdefault((p.grad.device, p.grad.dtype), []).append(p.grad)
            for grads in kinds.values():
                torch._foreach_div_(grads, size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        Clears the gradients. ``p.grad`` is set to None in any case, as the sum of the
        next backward pass takes its place. What a step that failed has left is
        forgotten, and the batch can be computed anew.
        """
        if self._unfinished is not None and not self._unfinished[1]:
            self._step_skip_queue[:] = self._unfinished[0]
            self._is_last_step_skipped, self._unfinished = False, None
        super().zero_grad(True)
        if not self._is_last_step_skipped:
            self.norms, self._clipped_at = [], None

    def _noise(
        self,
        like: torch.Tensor,
        shape: Sequence[int],
        std: float,
        generator: Optional[torch.Generator],
    ) -> torch.Tensor:
        if not std:
            return like.new_zeros(shape)
        # What Opacus draws, without the zeros that it sets up beside it.
        return torch.normal(
            0,
            std,
            shape,
            device=like.device,
            generator=generator,
            dtype=like.dtype,
        )

    def _adds_noise(self, p: torch.nn.Parameter) -> bool:
        """Whether it is this process that adds the noise to a parameter's gradient."""
        return True

    def _generator_of(self, p: torch.nn.Parameter) -> Optional[torch.Generator]:
        return self._generator_for(p.device)


def _draw_seed() -> int:
    """A seed that goes with torch's. It is drawn, or the next would be the same."""
    return int(torch.randint(2**63 - 1, ()))


_WITH_HOOKS: "weakref.WeakSet[HooksDPOptimizer]" = weakref.WeakSet()


class HooksDPOptimizer(_ClippingOptimizer, DPOptimizer):
    """Clips ``p.grad_sample`` with any clipping function; norms in float32 or wider."""

    mode: Any = None  # of the model, set by make_private

    def pre_step(self, closure: Optional[Any] = None) -> Optional[float]:
        """
        Raises:
            Refused: if the gradients have gone on to another model as well
        """
        if getattr(self.mode, "fed", False):
            raise Refused(
                "The input of the private model was computed by another model that is "
                "trained, and got gradients that are not clipped.",
                remedy="Make it part of the model that make_private is given, detach() "
                "its output, or call zero_grad() before the private loss: a generator "
                "is trained by a loss of its own.",
            )
        return super().pre_step(closure)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _WITH_HOOKS.add(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and those of parameters that no optimizer holds."""
        super().zero_grad(set_to_none)
        alike = [other for other in _WITH_HOOKS if other.mode is self.mode]
        held = {p for optimizer in alike for p in optimizer.params}
        for p in self.mode._module.parameters() if self.mode is not None else ():
            if p not in held and getattr(p, "grad_sample", None) is not None:
                p.grad_sample = None

    def clip_and_accumulate(self) -> None:
        """Stores the sum of clipped gradients in ``p.summed_grad``."""
        self._check_same_bound()
        params, grad_samples = self.params, self.grad_samples
        for p in params:
            _check_processed_flag(p.grad_sample)
        size = len(grad_samples[0])
        total = ClippedSum(
            dict(zip(map(str, range(len(params))), params)),
            size,
            self.clipping_function,
            self.on_nonfinite,
        )
        if size:
            samples = {
                id(p): GradSample(p.shape, size, g.reshape(size, -1))
                for p, g in zip(params, grad_samples)
            }
            total.add_samples(samples)
        self.norms.append(total.norms)
        for p, grad in zip(params, total.sums().values()):
            p.summed_grad = grad if p.summed_grad is None else p.summed_grad.add_(grad)
            _mark_as_processed(p.grad_sample)


class GhostDPOptimizer(_ClippingOptimizer, DPOptimizerFastGradientClipping):
    """Takes over ``p.grad``, the clipped sum that one backward pass has left."""

    ready = False  # whether p.grad holds a clipped sum that no step has used
    # p.grad, with its version, and the sum as it is before it is rounded to the dtype
    _taken: List[Tuple[torch.Tensor, int, torch.Tensor]] = []
    _taken_norms: Optional[torch.Tensor] = None  # of the samples in them

    def take(
        self,
        sums: Dict[torch.nn.Parameter, torch.Tensor],
        norms: Optional[torch.Tensor],
    ) -> None:
        """
        Sets ``p.grad`` of each parameter to its clipped sum, for the next step.

        Args:
            sums: by parameter
            norms: of the samples' gradients before clipping ``[B]``; None if no
                process knows them
        """
        self._check_same_bound()
        for p, total in sums.items():
            p.grad = total.detach().to(p.dtype)
        self._taken = [
            (p.grad, p.grad._version, p.grad if p.grad.dtype == x.dtype else x.detach())
            for p, x in ((p, sums[p]) for p in self.params)
        ]
        self._taken_norms = norms
        self.ready = True

    def accumulate(self) -> None:
        """
        Moves ``p.grad`` to ``p.summed_grad``.

        Raises:
            Refused: if no clipped backward pass has come before, or ``p.grad`` was
                changed since
        """
        if not self.ready:
            raise Refused(
                "optimizer.step() without clipped gradients.",
                remedy=(
                    "Call backward() once before each step, on the loss that the "
                    "criterion returned by make_private gives: gradients of any other "
                    "loss are not private. In the place of a model's own output.loss "
                    "take criterion=opacus_ext.losses.PerSample() and call criterion("
                    "opacus_ext.losses.model_losses(model, batch)).backward()."
                ),
            )
        taken, self._taken = self._taken, []
        for p, (grad, version, _) in zip(self.params, taken):
            if p.grad is not grad or grad._version != version:
                raise Refused(
                    "The clipped gradients were changed between backward() and "
                    "step(), before the noise: by clip_grad_norm_, a gradient scaler "
                    "or the like.",
                    remedy="Leave that out; samples are clipped one by one already.",
                )
        goes_on = self._check_skip_next_step(pop_next=False)
        for p, (_, _, total) in zip(self.params, taken):
            if p.summed_grad is None:
                # The next batch may be given the same memory, by CUDA graphs.
                p.summed_grad = total.clone() if goes_on else total
            else:
                p.summed_grad = p.summed_grad.add_(total)
            p.grad = None
        self.norms.append(self._taken_norms)
        self.ready = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; see ``DPOptimizerFastGradientClipping``."""
        super().zero_grad(set_to_none)
        self.ready, self._taken = False, []


class _Distributed:
    """
    Several processes with samples of their own, the gradients summed over them before
    the step counts. The noise of a parameter is added once: by process 0 where all have
    it, else (experts that are sharded, see grad_sample/parallel) by the process that
    has it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._processes = ExpertGroup()
        self._refuse_differences()
        self._seed = 0
        self._generators: Dict[torch.device, torch.Generator] = {}

    def _refuse_differences(self) -> None:
        """Noise is added by one process, and must fit what all of them have clipped."""
        bounds = [self.max_grad_norm] if self._bounds is None else self._bounds
        weighted = sum(i * bound for i, bound in enumerate(bounds, 1))
        size = self.expected_batch_size
        settings = self.noise_multiplier, -1 if size is None else size, weighted
        device = next((p.device for p in self.params), torch.device("cpu"))
        x = torch.tensor([*settings, len(bounds)], dtype=torch.float64, device=device)
        if bool((self._processes.gather(x[None]) != x).any()):
            raise Refused(
                "noise_multiplier, max_grad_norm or the expected batch size (the "
                "length of the data set and its loader) differ between processes; "
                f"here they are {self.noise_multiplier}, {bounds} and {size}.",
                remedy="Make them the same everywhere.",
            )

    def pre_step(self, closure: Optional[Any] = None) -> Optional[float]:
        """See ``DPOptimizer``; all processes step, or all wait for another batch."""
        given = (p for group in self.param_groups for p in group["params"])
        sharded = next(filter(self._is_sharded, given), None)
        if sharded is not None:
            skip = self._check_skip_next_step(pop_next=False)
            here = torch.tensor([skip], device=sharded.device)
            if bool((self._processes.gather(here) != here).any()):
                raise Refused(
                    "Some processes have another physical batch before the step, and "
                    "others have not.",
                    remedy=(
                        "Where experts are spread over processes, choose "
                        "max_physical_batch_size so that all split alike, or none "
                        "splits."
                    ),
                )
        return super().pre_step(closure)

    def _adds_noise(self, p: torch.nn.Parameter) -> bool:
        return self.rank == 0 or self._is_sharded(p)

    def _generator_of(self, p: torch.nn.Parameter) -> Optional[torch.Generator]:
        if not self._is_sharded(p):
            return self.generator or self._generator_for(p.device)
        if p.device not in self._generators:
            generator = torch.Generator(p.device).manual_seed(self._seed)
            self._generators[p.device] = generator
        return self._generators[p.device]

    def _draw_seed(self) -> None:
        """
        Of the noise of this process's share in one step. Equal seeds must not give the
        shares of different processes equal noise; and drawn anew for each step, it
        goes on with the random state of a checkpoint and repeats no noise.
        """
        generator = self._generator_for(torch.device("cpu"))
        draw = torch.randint(2**62, (1,), generator=generator, device=generator.device)
        self._seed = (int(draw) + (self.rank + 1) * 0x9E3779B97F4A7C15) % 2**63
        self._generators.clear()

    @staticmethod
    def _is_sharded(p: torch.nn.Parameter) -> bool:
        return group_of(p) is not None

    @property
    def sensitivity(self) -> float:
        """The largest norm of one sample's clipped gradient, over all processes."""
        if not self.clipping.per_parameter:
            return super().sensitivity
        bounds = []
        for p, bound in zip(self.params, self.clipping_bound):
            bounds += [bound] * (self.world_size if self._is_sharded(p) else 1)
        return self.clipping.at(bounds).sensitivity("add_or_remove_one")

    def add_noise(self) -> None:
        """Adds noise and sums over the processes; sets ``p.grad``."""
        if any(map(self._is_sharded, self.params)):
            self._draw_seed()
        super().add_noise()
        for p in self.params:
            if self.loss_reduction == "mean":
                p.grad /= self.world_size  # the expected batch size is one process's

    def _gather(self, p: torch.nn.Parameter, total: torch.Tensor) -> None:
        if not self._is_sharded(p):
            self._processes.sum(total)


class DistributedHooksDPOptimizer(_Distributed, HooksDPOptimizer):
    """:class:`HooksDPOptimizer` of one of several processes."""


class DistributedGhostDPOptimizer(_Distributed, GhostDPOptimizer):
    """:class:`GhostDPOptimizer` of one of several processes."""


def optimizer_class(base: Type[_ClippingOptimizer], clipping: Clipping) -> type:
    """``base`` with ``clipping`` in the place of flat clipping."""
    if clipping is CLIPPINGS["flat"]:
        return base
    name = f"{base.__name__}_{clipping.name}"
    return type(name, (base,), {"clipping": clipping, "__doc__": base.__doc__})


# -- what is looked at in the loop -----------------------------------------------------


class Watch:
    """
    What a DP optimizer notes of its steps: what would void the guarantee, by numbers
    that are at hand.

    Args:
        engine: that has made the model private
        module: the model
        records: of the data set
        rate: of Poisson sampling; None if batches are drawn in another way
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        module: nn.Module,
        records: int,
        rate: Optional[float],
    ):
        self.engine, self.module = weakref.ref(engine), weakref.ref(module)
        self.records = records
        self.rate = rate if rate is not None and 0 < rate < 1 else None
        self.stepping = False  # whether the DP optimizer is in its step
        self.size: Optional[int] = None
        self.chance = 0.0  # log of the probability that all batches have this size

    @property
    def active(self) -> bool:
        """Whether the model is still private."""
        return hasattr(self.module(), "autograd_grad_sample_hooks")

    def step(self, optimizer: Any, norms: List[Optional[torch.Tensor]]) -> None:
        """Called once a logical batch, with the norms of its samples."""
        module = self.module()
        if module is not None and not module.training:
            warn_once(
                optimizer,
                "eval",
                "A step is taken while the model is in evaluation mode: gradients are "
                "private, but dropout and the like are off. Call model.train() after "
                "evaluation.",
            )
        size = sum(len(n) for n in norms if n is not None)
        if self.rate is not None:
            drawn = min(self.rate * optimizer.accumulated_iterations, 1.0)
            self._look_for_views(optimizer, size, drawn)
        if self.rate is not None:
            self._look_at(optimizer, size, self.rate)

    def _look_for_views(self, optimizer: Any, size: int, rate: float) -> None:
        """More samples than can have been drawn: a record is several of them."""
        usual = self.records * rate
        surely = _log_binomial(self.records, rate, size) < math.log(1e-15)
        if size > usual and surely:
            self.rate = None
            warn_once(
                optimizer,
                "views",
                f"A step had {size} samples, where {usual:.0f} records are drawn on "
                "average: if a record makes several, its gradients are clipped one by "
                "one and epsilon does not hold. Views or sequences of a record are one "
                "sample with opacus_ext.losses.PerRecord.",
            )

    def _look_at(self, optimizer: Any, size: int, rate: float) -> None:
        """Poisson sampling hardly ever draws as many records each time."""
        if self.size not in (None, size):
            self.rate = None  # it varies: nothing more to see
            return
        self.size = size
        self.chance += _log_binomial(self.records, rate, size)
        if self.chance < math.log(1e-12):
            self.rate = None
            warn_once(
                optimizer,
                "loader",
                f"All batches so far had {size} samples, which Poisson sampling does "
                "not draw: the loop seems to use another loader than the one that "
                "make_private has returned, and epsilon does not hold for that.",
            )


def _log_binomial(n: int, p: float, k: int) -> float:
    if not 0 <= k <= n or p >= 1:
        return 0.0 if k == n else -math.inf
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)


#: By the optimizer that a DP optimizer wraps.
WATCHES: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watch_steps(engine: PrivacyEngine, module: nn.Module, made: Sequence[Any]) -> None:
    """Watches the loop that trains what ``make_private`` has returned."""
    optimizer, loader = made[1], made[-1]
    if not isinstance(optimizer, _ClippingOptimizer):
        return  # one of Opacus's own
    module = getattr(module, "_module", module)  # it was wrapped before
    batches: Any = getattr(loader, "batch_sampler", None)
    poisson = isinstance(batches, UniformWithReplacementSampler)
    drawn = poisson and not hasattr(batches, "sampling")
    rate = batches.sample_rate if drawn else None
    optimizer.watch = Watch(engine, module, len(loader.dataset), rate)
    original = optimizer.original_optimizer
    if not hasattr(original, "_optimizer_step_pre_hooks"):
        return
    if original not in WATCHES:
        original.register_step_pre_hook(_refuse_step)
    WATCHES[original] = optimizer.watch


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before each step of an optimizer whose model is private."""
    watch = WATCHES.get(optimizer)
    if watch is not None and watch.active and not watch.stepping:
        raise Refused(
            f"{type(optimizer).__name__}.step() of the optimizer that was passed to "
            "make_private: its gradients are not private.",
            parameter="optimizer",
            remedy="Call step() of the optimizer that make_private has returned; to "
            "train without privacy make another optimizer.",
        )
