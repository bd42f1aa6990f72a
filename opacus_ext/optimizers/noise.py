"""The noise of a DP optimizer, from a generator of its own."""

from __future__ import annotations

import functools
import secrets
import weakref
from collections import defaultdict
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch.distributed.tensor import DTensor

from opacus_ext.data.spent import state_of
from opacus_ext.ledger import note_beside
from opacus_ext.refused import Refused
from opacus_ext.secure import (
    SecureSource,
    add_rounded_noise,
    gaussian_grid,
    with_noise,
)
from opacus_ext.strategies.stream import CorrelatedNoise

if TYPE_CHECKING:
    Base = DPOptimizer
else:
    Base = object  # a mixin comes before one of Opacus's optimizers

_optimizers: "weakref.WeakSet[NoisyOptimizer]" = weakref.WeakSet()
_ALIKE = (
    "The difference between this run and another one of this process: both were seeded "
    "with the same number, so that their noise is the same and cancels. Seed once, "
    "before the first run."
)
# Parameters of so few entries share a draw: starting kernels takes longer than they do.
_SMALL = 2**16
# Keys of checkpoints.
CORRELATED, _NOISE = "opacus_ext_correlated_noise", "opacus_ext_noise_of"


class NoisyOptimizer(Base):
    """
    An optimizer that adds noise to ``p.summed_grad`` and sets ``p.grad``. Other random
    numbers, and ``torch.manual_seed`` in the loop, have no influence on its noise.
    """

    rank = 0  # of the process
    looks_ahead = 1  # batches that a loader draws ahead if Accelerate has prepared it
    correlated: Optional[CorrelatedNoise] = None  # set by make_private
    ledger: Any = None  # of its engine, set by make_private
    _divides = False  # True in a step, where add_noise() also divides
    _divided = False  # True if it has, so that scale_grad() does not

    def __init__(self, *args: Any, **kwargs: Any):
        self._noise_seed = draw_seed()
        self._noise_of = secrets.randbits(63)  # tells this optimizer's states apart
        self._noise_generators: Dict[torch.device, torch.Generator] = {}
        self._noise_states: Set[Any] = set()  # hashes of generators at earlier steps
        self._repeats = False  # True if it was told to repeat another's noise
        super().__init__(*args, **kwargs)
        _optimizers.add(self)

    @property
    def gradient_noise_multiplier(self) -> float:
        """The standard deviation of the noise, over the sensitivity."""
        return float(self.noise_multiplier)

    @property
    def sensitivity(self) -> float:
        """The largest norm of one sample's clipped gradient."""
        raise NotImplementedError

    @property
    def divisor(self) -> float:
        """The expected batch size if the loss is a mean, else 1."""
        if self.loss_reduction != "mean":
            return 1.0
        return self.expected_batch_size * self.accumulated_iterations

    @property
    def noise_variance(self) -> float:
        """The variance of the noise in an entry of the gradients that a step takes."""
        std = self.gradient_noise_multiplier * self.sensitivity / self.divisor
        if self.correlated is not None:
            std *= self.correlated.std
        return std**2

    # -- the generator -----------------------------------------------------------------

    def mix_noise(self) -> None:
        """
        Draws all later noise from fresh randomness. A run that resumes a checkpoint
        needs that, because another run may resume the same checkpoint.
        """
        self._noise_seed = secrets.randbits(63)
        self._noise_generators.clear()
        if self.generator is not None and not self.secure_mode:
            self.generator.manual_seed(self._noise_seed)

    def noise_state(self) -> Dict[str, Any]:
        """
        The state from which later noise is drawn. Whoever has it knows that noise. In
        secure mode there is no such state.
        """
        if self.secure_mode:
            return {}
        users = self.generator
        return {
            "seed": self._noise_seed,
            "generators": {
                str(device): generator.get_state()
                for device, generator in self._noise_generators.items()
            },
            "given": None if users is None else users.get_state(),
        }

    def repeat_noise(self, state: Mapping[str, Any]) -> None:
        """
        Sets the state that later noise is drawn from. Two runs that resume from one
        state add the same noise: the difference of their weights has none.

        Args:
            state: as from :meth:`noise_state`

        Raises:
            Refused: in secure mode, and for the state of a run in secure mode
        """
        if self.secure_mode or not state:
            raise Refused(
                "Noise in secure mode can't be repeated: its state is not kept.",
                parameter="repeat_noise",
                remedy="Leave repeat_noise out, so that noise is drawn afresh.",
            )
        self._repeats = True
        self._noise_seed = state["seed"]
        self._noise_generators = {
            torch.device(name): torch.Generator(name).set_state(generator.cpu())
            for name, generator in state["generators"].items()
        }
        if state["given"] is not None and self.generator is not None:
            self.generator.set_state(state["given"].cpu())

    def _generator_for(self, device: torch.device) -> Any:
        if self.secure_mode:
            return SecureSource()
        if self.generator is not None:
            return self.generator
        if device not in self._noise_generators:
            generator = torch.Generator(device).manual_seed(self._noise_seed)
            self._noise_generators[device] = generator
        return self._noise_generators[device]

    def _watched_generator(self) -> Any:
        """Returns the generator that each step draws from, and no state of it twice."""
        return self._generator_for(self.params[0].device)

    def _generators_of(self, params: Sequence[Any]) -> List[Any]:
        """Returns what each parameter's noise is drawn from; None for no noise."""
        devices = {p.device for p in params}
        generators = {device: self._generator_for(device) for device in devices}
        return [generators[p.device] for p in params]

    def _draws_noise(self) -> bool:
        """Returns True if this process draws random numbers for the noise."""
        return True

    def _share(self, p: Any) -> Optional[Tuple[Any, ...]]:
        """
        Returns which share of a parameter this process adds noise to; None for none. A
        process that has all of it adds noise to ``()``.
        """
        return ()

    def _state_of_noise(self) -> Optional[int]:
        """
        A hash of the generator's state before this step; None if it draws no noise.

        Raises:
            Refused: if an earlier step began with this state, and for correlated noise
                that has lost what it is to take back
        """
        if self.correlated is not None:
            self.check_rows(self.correlated)
        if self.secure_mode or not self.noise_multiplier:
            return None
        if not self._draws_noise():
            return None
        if self._check_skip_next_step(pop_next=False):
            return None
        state = state_of(self._watched_generator())
        if state in self._noise_states:
            raise Refused(
                "The generator of the noise is in the state of an earlier step, so "
                "that both steps would have the same noise: subtracted from each other "
                "they have none.",
                parameter="noise_generator",
                remedy="Seed it once, before make_private, and not in the loop.",
            )
        return state

    def check_rows(self, noise: CorrelatedNoise) -> None:
        """
        Raises:
            Refused: if correlated noise has lost what it is to take back
        """
        shares = {self._share(p) for p in self.params}
        noise.check_shares(shares - {None})

    def _note_noise(self, state: Optional[int]) -> None:
        """Notes the state that a step's noise was drawn from."""
        if state is None:
            return
        self._noise_states.add(state)
        others = (x for x in _optimizers if x is not self and not self._repeats)
        if any(state in other._noise_states for other in others):
            note_beside(self, "noise", _ALIKE)

    # -- the noise ---------------------------------------------------------------------

    def add_noise(self) -> None:
        """
        Adds noise of std ``gradient_noise_multiplier * sensitivity``; sets ``p.grad``.
        In a step it also divides by the batch size, except in secure mode, where sums
        over processes must be sums of numbers on the grid.
        """
        params = self.params
        for p in params:
            if hasattr(p.summed_grad, "_processed"):
                _check_processed_flag(p.summed_grad)  # raises
        if self.secure_mode and self.noise_multiplier:
            multiplier, bound = self.gradient_noise_multiplier, self.sensitivity
            entries = sum(p.numel() for p in params)
            std, grid = gaussian_grid(multiplier, bound, entries)
            for p in params:
                p.summed_grad.copy_(add_rounded_noise(p.summed_grad, std, grid))
        else:
            self._add_noise(params)
            self._divided = self._divides
        self._sum_over_processes()
        # An optimizer that allows for the noise (noise_aware.py) is told of it.
        if hasattr(self.original_optimizer, "noise_variance"):
            aware: Any = self.original_optimizer
            aware.noise_variance = self.noise_variance
        for p in params:
            total = p.summed_grad
            if total.shape != p.shape:
                total = total.view_as(p)
            p.grad = total if total.dtype == p.dtype else total.to(p.dtype)
        _mark_as_processed([p.summed_grad for p in params])

    def release(
        self, statistic: torch.Tensor, noise_multiplier: float, sensitivity: float
    ) -> torch.Tensor:
        """
        Returns a statistic of the samples of all processes, with noise.

        Args:
            statistic: of the samples of this process, which are added up
            noise_multiplier: the standard deviation of the noise, over the sensitivity
            sensitivity: the most that one record changes the statistic, in L2 norm
        """
        generator = self._generator_for(statistic.device)
        return with_noise(statistic, noise_multiplier, sensitivity, generator)

    def _sum_over_processes(self) -> None:
        """Adds the sums of other processes to ``p.summed_grad``."""

    def _add_noise(self, params: Sequence[Any]) -> None:
        multiplier = self.gradient_noise_multiplier
        std = multiplier * self.sensitivity
        divisor = self.divisor if self._divides else 1.0
        if self.correlated is not None:
            self.correlated.begin(multiplier, self._places_of(params))
        small: Dict[tuple, List[tuple]] = defaultdict(list)
        undivided = []
        totals = on_this_process([p.summed_grad for p in params])
        for p, total, generator in zip(params, totals, self._generators_of(params)):
            if generator is None:
                undivided.append(total)
            elif total.numel() <= _SMALL:
                undivided.append(total)
                small[total.device, total.dtype, generator].append((p, total))
            else:  # in place: gradients and one noise tensor, as without privacy
                arguments = [p], total, total.shape, std / divisor, generator
                noise = self._row(*arguments)
                torch.add(noise, total, alpha=1 / divisor, out=total)
        for (_, _, generator), pairs in small.items():
            members, sums = zip(*pairs)
            sizes = [total.numel() for total in sums]
            noise = self._row(members, sums[0], (sum(sizes),), std, generator)
            rows = [x.view_as(y) for x, y in zip(noise.split(sizes), sums)]
            torch._foreach_add_(sums, rows)
        divide(undivided, divisor)
        if self.correlated is not None:
            self.correlated.end()

    def _places_of(self, params: Sequence[torch.nn.Parameter]) -> List[int]:
        """Returns the positions of some parameters among those of all groups."""
        params_of_groups = (p for group in self.param_groups for p in group["params"])
        positions = {id(p): i for i, p in enumerate(params_of_groups)}
        return [positions[id(p)] for p in params]

    def _row(
        self,
        params: Sequence[torch.nn.Parameter],
        like: torch.Tensor,
        shape: Sequence[int],
        std: float,
        generator: Optional[torch.Generator],
    ) -> torch.Tensor:
        """This step's noise for some parameters."""
        if self.correlated is None or generator is None:
            return _normal(like, shape, std, generator)
        name = (self._share(params[0]), *self._places_of(params))
        draw = functools.partial(_normal, like, shape, 1.0)
        row = self.correlated(name, draw, generator)
        return row.mul_(std).to(like.dtype)

    # -- checkpoints -------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """The state of the wrapped optimizer, and that of correlated noise."""
        state = {**super().state_dict(), _NOISE: self._noise_of}
        if self.correlated is not None:
            state = {**state, CORRELATED: self.correlated.state_dict()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """
        Loads what :meth:`state_dict` returned.

        Raises:
            Refused: if only one of the two runs has correlated noise
        """
        state = dict(state_dict)
        noise, noise_of = state.pop(CORRELATED, None), state.pop(_NOISE, None)
        self._check_kind(noise)
        super().load_state_dict(state)
        if noise_of != self._noise_of:
            self.mix_noise()
            if self.ledger is not None:
                self.ledger.draw_afresh()
        else:  # Accelerate loads an optimizer's own state, and draws a batch ahead
            self.ahead += self.looks_ahead
        self.load_noise(noise)

    def load_noise(self, state: Optional[Mapping[str, Any]]) -> None:
        """
        Loads the state of correlated noise; None for independent noise, which has none.
        Of the state of other processes it keeps what this one adds noise to.

        Raises:
            Refused: if only one of the two runs has correlated noise
        """
        self._check_kind(state)
        if self.correlated is None or state is None:
            return
        groups = self.param_groups
        shares = {self._share(p) for group in groups for p in group["params"]}
        kept = {
            key: {name: x for name, x in state[key].items() if name[0] in shares}
            for key in ("past", "states")
        }
        self.correlated.load_state_dict({**state, **kept})

    def _check_kind(self, state: Optional[Mapping[str, Any]]) -> None:
        if (state is None) != (self.correlated is None):
            raise Refused(
                "The checkpoint is of a run with "
                f"{'independent' if state is None else 'correlated'} noise, or leaves "
                "the noise out, and this run has the other kind.",
                parameter="noise",
                remedy="Pass make_private the noise that the run began with. "
                "torch.distributed.checkpoint takes optimizer.original_optimizer, and "
                "each process what optimizer.correlated.state_dict() returns.",
            )


def on_this_process(tensors: List[torch.Tensor]) -> List[torch.Tensor]:
    """
    Returns tensors as they are, and for sharded tensors the shards of this process,
    which share their memory.
    """
    if DTensor not in map(type, tensors):
        return tensors
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def _normal(
    like: torch.Tensor,
    shape: Sequence[int],
    std: float,
    generator: Optional[torch.Generator],
) -> torch.Tensor:
    if not std:
        return like.new_zeros(shape)
    # Opacus's draw, without the zeros that it sets up beside it.
    kind: Any = dict(device=like.device, dtype=like.dtype, generator=generator)
    return torch.normal(0, std, shape, **kind)


def divide(totals: Sequence[torch.Tensor], divisor: float) -> None:
    """Divides tensors in place, all tensors of a device and dtype at once."""
    if divisor == 1:
        return
    kinds: Dict[tuple, List[torch.Tensor]] = defaultdict(list)
    for total in totals:
        kinds[total.device, total.dtype].append(total)
    for same in kinds.values():
        torch._foreach_div_(same, divisor)


def draw_seed() -> int:
    """Draws a seed from torch's generator, so that two optimizers in a row differ."""
    return int(torch.randint(2**63 - 1, ()))
