"""The stream of correlated noise that an optimizer adds."""

from __future__ import annotations

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

from opacus_ext import strategies
from opacus_ext.refused import Refused
from opacus_ext.strategies import Strategy

#: Which share of some parameters a process has, and their places.
Name = Tuple[Any, ...]


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
        self._furthest = 0  # the most steps of which the accountant knows
        self.noise_multiplier: Optional[float] = None  # of the run, from its first step
        self.trained: Optional[List[int]] = None  # the same
        #: The bins of records, where they are drawn once for the run.
        self.allocation: Optional[torch.Tensor] = None
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
        self._furthest = max(self._furthest, self.taken)

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
        )
        kept = {name: getattr(self, name) for name in names}
        plan = {"strategy": type(self.strategy).__name__, **vars(self.strategy)}
        return {"plan": plan, **kept, "past": self._past, "states": self._states}

    def go_back(self) -> None:
        """
        Called before a checkpoint is loaded that takes the accountant back. If no state
        of this noise follows, its steps so far are counted anew with the next one.
        """
        self.counted = self._furthest = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Loads what :meth:`state_dict` returned. If steps were taken since, which the
        accountant keeps, those before count once more: a record has them in two runs.

        Raises:
            Refused: for that of a run with another strategy, or other parts of the data
        """
        plan = dict(state["plan"])
        of = getattr(strategies, plan.pop("strategy"))(**plan)
        given, own = (of, state["separation"]), (self.strategy, self.separation)
        if given != own:
            raise Refused(
                f"The checkpoint has noise of {given[0]} and {given[1]} parts of the "
                f"data set, and the run has {own[0]} and {own[1]}.",
                parameter="noise",
                remedy="Go on with what the run began with.",
            )
        goes_back = self._furthest > state["taken"]
        self.taken, self.noise_multiplier = state["taken"], state["noise_multiplier"]
        self.trained, self._drawing = state["trained"], False
        self._furthest = max(self._furthest, self.taken)
        self.counted = 0 if goes_back else state["counted"]
        self.branches = max(self.branches, state.get("branches", 0)) + goes_back
        self.allocation = state["allocation"]
        self._past = {name: x.clone() for name, x in state["past"].items()}
        self._states = {name: x.cpu().clone() for name, x in state["states"].items()}
