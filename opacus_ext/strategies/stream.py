"""The stream of correlated noise that an optimizer adds."""

from __future__ import annotations

import secrets
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Hashable,
    List,
    Mapping,
    Optional,
    Tuple,
)

import numpy as np
import torch
from scipy.signal import lfilter

from opacus_ext.refused import Refused
from opacus_ext.strategies import Strategy

#: Which share of some parameters a process has, and their places.
Name = Tuple[Any, ...]

#: The most steps that were taken in this process from a state, by its stream.
_farthest: Dict[int, int] = {}


class CorrelatedNoise:
    """
    The rows of ``C^-1 Z``, one a step, from those of ``Z``.

    A strategy computes a row from what was kept of the rows before, as many tensors of
    the size of the model, in float32 or wider, as its ``memory``; or from rows of ``Z``
    that are drawn again from the states of their generator, if it ``draws_again``. Of
    several processes, that which adds noise to a share of a parameter keeps its rows.

    Args:
        strategy: C
        separation: least steps between two of one record. If columns of C that are so
            far apart have no row in common, the run may take more steps than planned
    """

    def __init__(self, strategy: Strategy, separation: int):
        self.strategy, self.separation = strategy, separation
        self.taken = 0  # steps
        self.counted = 0  # rounds of ``separation`` steps, by the accountant
        self.branches = 0  # how often it went back to steps that stay counted
        self.noise_multiplier: Optional[float] = None  # of the run, from its first step
        self.trained: Optional[List[int]] = None  # the same
        #: The bins of records, where they are drawn once for the run.
        self.allocation: Optional[torch.Tensor] = None
        self.stream = secrets.randbits(63)  # tells the states of this run apart
        self._goes_back = False  # True if the accountant goes back with the next state
        self._drawing = False  # True if a step's noise is drawn, or was in part
        self._past: Dict[Name, torch.Tensor] = {}  # [memory, ...]
        self._states: Dict[Name, torch.Tensor] = {}  # of generators

    @property
    def is_amplified(self) -> bool:
        """True if each participation of a record is a mechanism of its own."""
        return self.strategy.span <= self.separation

    def __call__(
        self,
        name: Name,
        draw: Callable[[torch.Generator], torch.Tensor],
        generator: torch.Generator,
    ) -> torch.Tensor:
        """
        The row for some parameters at this step.

        Args:
            name: of the parameters: which share of them, and their places
            draw: draws independent noise of std 1
            generator: to draw from

        Returns:
            Noise of the shape of what is drawn, in float32 or wider.

        Raises:
            Refused: if the rows of the steps before are missing
        """
        again = self.strategy.draws_again
        state = generator.get_state() if again else None
        z = draw(generator)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        past = self._drawn_again(name, draw, z) if again else self._kept(name, z)
        row = self.strategy.row(past, z, self.taken)
        if state is not None:
            self._states[name] = state
        return row

    def _kept(self, name: Name, z: torch.Tensor) -> torch.Tensor:
        """Returns what was kept of the rows before, which the strategy updates."""
        if name not in self._past:
            if self.strategy.memory:
                self._refuse_missing()
            self._past[name] = z.new_zeros(self.strategy.memory, *z.shape)
        elif self._past[name].device != z.device:  # a checkpoint's
            self._past[name] = self._past[name].to(z.device)
        return self._past[name]

    def _drawn_again(
        self,
        name: Name,
        draw: Callable[[torch.Generator], torch.Tensor],
        z: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the row of ``Z`` of the step before."""
        if name not in self._states:
            self._refuse_missing()
            return torch.zeros_like(z)[None]
        generator = torch.Generator(z.device).set_state(self._states[name])
        return draw(generator).to(z.dtype)[None]

    def check_shares(self, shares: Collection[Hashable]) -> None:
        """
        Checks that what the next step takes back is there, before the step begins.

        Args:
            shares: to which this process adds noise

        Raises:
            Refused: if the checkpoint was of other shares
        """
        kept = self._states if self.strategy.draws_again else self._past
        if not {share for share, *_ in kept}.issuperset(shares):
            self._refuse_missing()

    def _refuse_missing(self) -> None:
        if self.taken:
            raise Refused(
                f"There is no noise of {self.taken} steps before to take back: the "
                "checkpoint is of a process that did not add it, or that had another "
                "share of the model.",
                parameter="noise",
                remedy="With DistributedDataParallel load that of process 0. With "
                "fully_shard, or experts that are spread, take as many processes as "
                "before, and load in each what it has saved.",
            )

    def begin(self, noise_multiplier: float, trained: List[int]) -> None:
        """
        Checks that a step adds the noise of the run's first step.

        Args:
            noise_multiplier: of the step
            trained: the places of the parameters with gradients

        Raises:
            Refused: if they are others than at the first step, for more steps than the
                sensitivity was computed for, and after a step whose noise was drawn in
                part, if what is kept of it can't be put right
        """
        if self._drawing and not self.strategy.can_redraw:
            raise Refused(
                "A step before this one has failed while its noise was drawn, and what "
                "this one would take back is not known.",
                parameter="noise",
                remedy="Go on from the last checkpoint.",
            )
        may_go_on = self.is_amplified and self.strategy.is_banded
        if self.taken >= self.strategy.steps and not may_go_on:
            raise Refused(
                f"{self.strategy} is planned for {self.strategy.steps} steps, which "
                "were taken: epsilon is not known for more.",
                parameter="noise",
                remedy="Plan as many steps as all epochs have, or end the run here.",
            )
        known = self.noise_multiplier
        if known is not None and known != noise_multiplier:
            raise Refused(
                f"The noise multiplier has changed from {known:g} to "
                f"{noise_multiplier:g}, which correlated noise is not accounted for.",
                parameter="noise",
                remedy='Keep it, or train with noise="independent".',
            )
        if self.trained not in (None, trained):
            raise Refused(
                "Other parameters are trained than at the first step, and correlated "
                "noise would take back what was added to those.",
                parameter="noise",
                remedy="Freeze and unfreeze before make_private, or train with "
                'noise="independent".',
            )
        self.noise_multiplier, self.trained = noise_multiplier, trained
        self._drawing = True

    def end(self) -> None:
        """Counts a step whose noise was drawn."""
        self._drawing = False
        self.taken += 1
        self._goes_back = False
        _farthest[self.stream] = max(_farthest.get(self.stream, 0), self.taken)

    def take_back(self, taken: int) -> None:
        """
        Called when a step has failed, before which so many were taken: it is to be made
        anew as the same step, as the distance of a record's steps depends on it. Its
        round counts again, as somebody may have seen both.
        """
        if self.taken > taken:
            self.taken, self._drawing = taken, True
            self._forget_round()

    def _forget_round(self) -> None:
        """Lets the round that is under way be counted again."""
        self.counted = min(self.counted, self.taken // self.separation)

    @property
    def std(self) -> float:
        """Standard deviation of the last step's row, for ``Z`` of std 1."""
        impulse = np.zeros(max(self.taken, 1))
        impulse[0] = self.strategy.factor
        inverse = lfilter(*self.strategy.filter, impulse)
        return float(np.sqrt(inverse @ inverse))

    def state_dict(self) -> Dict[str, Any]:
        """To go on with; whoever has it can take noise off the gradients."""
        names = (
            "taken",
            "counted",
            "branches",
            "noise_multiplier",
            "trained",
            "separation",
            "allocation",
            "stream",
        )
        kept = {name: getattr(self, name) for name in names}
        # Later steps change what is kept; a copy on its device may be too large.
        past = {name: x.to("cpu", copy=True) for name, x in self._past.items()}
        return {"plan": self._plan(), **kept, "past": past, "states": {**self._states}}

    def _plan(self) -> Dict[str, Any]:
        """Returns the strategy as plain values."""
        return {"strategy": type(self.strategy).__name__, **vars(self.strategy)}

    def go_back(self) -> None:
        """
        Called before a checkpoint is loaded that takes the accountant back, too. If no
        state of this noise follows, the round that is under way is counted again.
        """
        self._goes_back = True
        self._forget_round()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Loads what :meth:`state_dict` returned. If this process has taken steps since,
        which the accountant keeps, those before count once more: a record has them in
        two runs.

        Raises:
            Refused: for that of a run with another strategy, or other parts of the data
        """
        given = state["plan"], state["separation"]
        own = self._plan(), self.separation
        if given != own:
            raise Refused(
                f"The checkpoint has noise of {_told(given[0])} and {given[1]} parts "
                f"of the data set, and the run has {_told(own[0])} and {own[1]}.",
                parameter="noise",
                remedy="Go on with what the run began with.",
            )
        taken = max(self.taken, _farthest.get(state.get("stream", 0), 0))
        counts_again = taken > state["taken"] and not self._goes_back
        # Accelerate loads an optimizer's own state before that of a checkpoint.
        self._goes_back = self._goes_back and not state["taken"]
        self.stream = secrets.randbits(63)
        self.taken, self.noise_multiplier = state["taken"], state["noise_multiplier"]
        self.trained, self._drawing = state["trained"], False
        self.counted = 0 if counts_again else state["counted"]
        self.branches = max(self.branches, state.get("branches", 0)) + counts_again
        self.allocation = state["allocation"]
        self._past = {name: x.clone() for name, x in state["past"].items()}
        self._states = {name: x.cpu().clone() for name, x in state["states"].items()}


def _told(plan: Mapping[str, Any]) -> str:
    """Shows a plan as the strategy is written."""
    values = (f"{name}={value!r}" for name, value in plan.items() if name != "strategy")
    return f"{plan['strategy']}({', '.join(values)})"
