"""
The private part of a run whose loop belongs to another library. ``PrivateTrainer`` and
``PrivacyCallback`` share it.
"""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    Mapping,
    Optional,
    Tuple,
    Union,
)

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.accountants.accountant import IAccountant
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from opacus_ext.accountants import noise_left
from opacus_ext.budget import banded, check_planned
from opacus_ext.data.allocation import Begun
from opacus_ext.data.choice import cyclic
from opacus_ext.data.draws import Draws, count_records, loader_like
from opacus_ext.data.logical import LogicalBatches, PhysicalBatch, derive_seed
from opacus_ext.data.sampling import Sampling
from opacus_ext.engine import INDEPENDENT
from opacus_ext.grad_sample.modes.common import Attachment, private_model_of
from opacus_ext.ledger import LEDGER, ledger_of
from opacus_ext.optimizers.optimizer import ClippingOptimizer
from opacus_ext.refused import Refused, check_number
from opacus_ext.runs import ACCOUNTANT, RUNS, add_runs, runs_of, spent_by
from opacus_ext.secure import SecureSource
from opacus_ext.statement import PrivacyStatement, privacy_statement
from opacus_ext.strategies import Banded, Strategy


def check_budget(
    target_epsilon: Optional[float], noise_multiplier: Optional[float]
) -> None:
    """Refuses an impossible epsilon or noise multiplier."""
    if (target_epsilon is None) == (noise_multiplier is None):
        raise Refused(
            "Give either target_epsilon or noise_multiplier; got "
            f"{target_epsilon} and {noise_multiplier}.",
            parameter="target_epsilon",
            remedy="target_epsilon chooses the noise for a budget; noise_multiplier is "
            "the noise itself.",
        )
    if target_epsilon is not None:
        check_number("target_epsilon", target_epsilon)
    else:
        check_number("noise_multiplier", noise_multiplier, zero=True)


def check_random(secure_mode: bool, **fixed: Any) -> None:
    """Refuses secure mode together with arguments that fix random numbers."""
    for name, value in fixed.items():
        if secure_mode and not (value is None or value is False):
            raise Refused(
                f"secure_mode=True takes random numbers from the operating system, "
                f"which {name}={value!r} can't fix.",
                parameter=name,
                remedy=f"Leave {name} out, or secure_mode.",
            )


BANDED = "banded"  # noise of as many bands as suit the budget


def check_noise(
    noise: Union[str, Strategy],
    target_epsilon: Optional[float],
    secure_mode: bool = False,
) -> str:
    """Refuses noise that no trainer draws; returns supported.py's word for it."""
    if noise == INDEPENDENT:
        return "secure" if secure_mode else INDEPENDENT
    if noise != BANDED and not isinstance(noise, Strategy):
        raise Refused(
            f"noise={noise!r} is no noise.",
            parameter="noise",
            remedy=f"Give {INDEPENDENT!r}, {BANDED!r}, or a strategy of correlated "
            "noise, such as opacus_ext.optimizers.Banded(bands=8, steps=1000).",
        )
    if secure_mode:
        raise Refused(
            "Correlated noise has no secure mode.",
            parameter="secure_mode",
            remedy="Leave it out, or noise.",
        )
    if noise == BANDED and target_epsilon is None:
        raise Refused(
            f"noise={BANDED!r} chooses the number of bands for a target_epsilon.",
            parameter="noise",
            remedy="Give target_epsilon in the place of noise_multiplier, or choose "
            "the number: opacus_ext.optimizers.Banded(bands=8, steps=1000).",
        )
    return "banded"


class Same:
    """Compares a value that a run depends on by identity."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


#: Where a run that goes on has others of these, its noise is chosen anew.
_PLAN = "target_epsilon", "max_steps"
_PLANNED = " Correlated noise is planned for the steps and the budget of a run."
#: What the privacy of a run depends on: values by their owner and name.
Basis = Dict[Tuple[str, str], Any]


def upgraded(saved: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns a checkpoint's state with what older versions did not write."""
    return {ACCOUNTANT: saved.get("accountant"), LEDGER: {}, RUNS: [], **saved}


class _Taken:
    """The physical batches that a run has taken."""

    place = -1, 0  # draw and part of the last one
    before: Optional[int] = None  # draws before the first step of correlated noise
    taken = size = 0  # number of them, and of the records of the last one

    def size_of(self, taken: int) -> Optional[int]:
        """Returns the number of records of the last one, if these are all."""
        return self.size if taken == self.taken else None


class PrivateTraining:
    """
    A model, its optimizer and its batches, private from ``make_private`` to ``end``.

    Attributes:
        engine: counts the steps
        hooks: what ``make_private`` has attached to the model; None outside of a run
        optimizer: Opacus's
        noise: random numbers of the noise; None in secure mode
        seed: of noise and draws
        draw: number of the next logical batch
        saved: the state of the checkpoint that the run goes on from, if there is one
        sampling: how the batches of a private run are drawn
    """

    process = (0, 1)  # number of this process, and of all
    hooks: Any = None
    optimizer: Any = None
    noise: Optional[torch.Generator] = None
    saved: Optional[Mapping[str, Any]] = None
    sampling: Optional[Sampling] = None
    sampler: Any  # of logical batches, as lists of record numbers
    batches: LogicalBatches
    _basis: Callable[[], Basis] = dict
    _began: Optional[Basis] = None  # what the run rests on, as it began

    def __init__(
        self,
        accountant: str,
        target_delta: float,
        target_epsilon: Optional[float],
        noise_multiplier: Optional[float],
        secure_mode: bool = False,
    ):
        check_number("target_delta", target_delta, below=1)
        check_budget(target_epsilon, noise_multiplier)
        with warnings.catch_warnings():
            # Of a secure mode that the user can't ask Opacus for here.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            self.engine = PrivacyEngine(accountant=accountant, secure_mode=secure_mode)
        self._taken = _Taken()
        ledger_of(self.engine).repeats = True  # draws have numbers, and noise keys
        self.target_delta, self.target_epsilon = target_delta, target_epsilon
        self.noise_multiplier = noise_multiplier
        self.seed = self.draw = 0

    def agreed(self, value: Any) -> Any:
        """Returns the value that process 0 has."""
        values = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(values)
        return values[0]

    def get_epsilon(self, delta: Optional[float] = None) -> float:
        """
        Returns the epsilon that has been spent, at ``target_delta`` or another delta.
        """
        return self.engine.get_epsilon(self.target_delta if delta is None else delta)

    def privacy_statement(
        self, delta: Optional[float] = None, unit: Optional[str] = None
    ) -> PrivacyStatement:
        """Returns the statement of all training so far."""
        delta = self.target_delta if delta is None else delta
        return privacy_statement(self.engine, delta, unit=unit)

    def logical_batches(
        self, sampling: Sampling, records: int, physical_batch_size: int, items: int = 1
    ) -> LogicalBatches:
        """Returns what draws the logical batches of the run."""
        generator = SecureSource() if self.engine.secure_mode else torch.Generator()
        self.sampler = Draws(sampling, records, generator)
        self.sampler.numbered = lambda: self.draw
        order: Dict[str, Any] = {"items": items, "seed": self.seed}
        order.update(process=self.process, start=lambda: self.draw)
        self.batches = LogicalBatches(
            self.sampler, generator, physical_batch_size, **order
        )
        return self.batches

    def make_private(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader,
        noise_multiplier: float,
        device: torch.device,
        sampling: Sampling,
        **kwargs: Any,
    ) -> Any:
        """
        Makes a model and its optimizer private, by
        ``PrivacyEngine.make_private(**kwargs)``. ``loader`` has the records, and the
        workers that draw ahead. Returns the criterion, if the mode has one.
        """
        if self.noise is None and not self.engine.secure_mode:
            self.noise = torch.Generator(device)
            self.noise.manual_seed(derive_seed(self.seed, "noise"))
        if self.saved is not None:
            if self.noise is not None:
                self.noise.seed()
            self.engine.accountant.load_state_dict(self.saved[ACCOUNTANT])
            spent = self.engine.accountant.history
            ledger = ledger_of(self.engine)
            ledger.go_on(spent)
            ledger.load_state_dict(self.saved[LEDGER])
            add_runs(self.engine, self.saved[RUNS])
        called, self.sampler.sampling = module, sampling
        if self.process[1] > 1 and not any(
            isinstance(part, FSDPModule) for part in module.modules()
        ):
            module = DPDDP(module)
        self.hooks, self.optimizer, *criterion, _ = self.engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader_like(
                loader, loader.dataset, self.sampler, loader.collate_fn
            ),
            noise_multiplier=noise_multiplier,
            noise_generator=self.noise,
            wrap_model=False,
            sampling=sampling,
            **kwargs,
        )
        if self.saved is not None and self.optimizer.correlated is not None:
            self.optimizer.correlated.go_back()
        self.sampling = sampling
        runs_of(self.engine)[-1]["target_delta"] = self.target_delta
        if self.saved is not None and self.optimizer.adaptive is not None:
            self.optimizer.adaptive.set_bound(*self.saved["bounds"])
        # They have numbers.
        self.optimizer.draws, self.sampler.taken, self._taken = None, None, _Taken()
        if self.sampler.sampling.allocates:
            self.optimizer.begun_epochs = self._begun()
        private = private_model_of(module)
        if private is not None:
            private.passes.counter = self._taken
        if called is not module and private is not None:  # which the loop goes on with
            attached: Any = module.autograd_grad_sample_hooks
            attached.append(Attachment(private, called))
        return criterion[0] if criterion else None

    def _begun(self) -> Begun:
        """Returns the allocations of the run, of which a checkpoint may have some."""
        sampler, steps = self.sampler, self.sampler.sampling.steps
        if self.engine.secure_mode:  # each is drawn once, also after a checkpoint
            return Begun(lambda: sampler.begun)
        # An earlier run of Lightning's callback has counted its own.
        begun = Begun(lambda: -(-self.draw // steps), self.draw // steps)
        if self.saved is not None:
            begun.recorded = -(-self.saved["draw"] // steps)
            begun.noise_multiplier = self.saved["noise_multiplier"]
        return begun

    @contextmanager
    def taking(self, batch: PhysicalBatch) -> Iterator[None]:
        """
        Takes the gradients of a physical batch. Refuses one that was taken before.
        """
        place = batch.draw, batch.part
        if place <= self._taken.place:
            raise Refused(
                f"Draw {batch.draw} of the run came back (part {batch.part} of it), "
                f"after draw {self._taken.place[0]}: each is accounted for once.",
                remedy="Let the Trainer's own loop alone read the training loader, and "
                "call its step once for each of its batches.",
            )
        self._check_noise(batch)
        self._taken.taken, self._taken.size = self._taken.taken + 1, batch.records
        private = getattr(self.hooks, "private", None)
        if private is not None and batch.records:
            private.inputs.drawn = [batch.records]
        yield
        self._taken.place = place

    def _check_noise(self, batch: PhysicalBatch) -> None:
        """Refuses to leave out draws, whose parts of the data set come in turn."""
        noise = self.optimizer.correlated
        if noise is None:
            return
        before, taken = batch.draw - noise.taken, self._taken
        if taken.before not in (None, before):
            raise Refused(
                f"Draw {batch.draw} of the run follows {noise.taken} steps of "
                f"correlated noise, and should follow {batch.draw - taken.before}: no "
                "record may be drawn twice in as many steps as there are parts.",
                remedy="Take one step on each batch of the training loader, or train "
                f"with noise={INDEPENDENT!r}.",
            )
        taken.before = before

    def keep(self, basis: Callable[[], Basis]) -> None:
        """
        Keeps what the privacy of the run depends on as training begins: what ``basis``
        returns, and the draws, the noise and the bound. :meth:`refuse_changes` refuses
        later changes, also in each step before the weights change.
        """
        self._basis, self._began = basis, {**basis(), **self._own_basis()}
        if isinstance(self.optimizer, ClippingOptimizer):
            self.optimizer.attach_step_hook(lambda optimizer: self.refuse_changes())

    def _own_basis(self) -> Basis:
        batches, draws, optimizer = self.batches, self.sampler, self.optimizer
        basis: Basis = {
            ("engine", "accountant"): Same(self.engine.accountant),
            ("draws", "sampling"): repr(draws.sampling),
            ("draws", "records"): draws.num_samples,
            ("draws", "items"): batches.items,
            ("draws", "seed"): (batches.seed, self.seed),
            ("optimizer", "noise_multiplier"): optimizer.noise_multiplier,
            ("optimizer", "expected_batch_size"): optimizer.expected_batch_size,
            ("optimizer", "loss_reduction"): optimizer.loss_reduction,
        }
        if isinstance(optimizer, ClippingOptimizer):
            bound = optimizer.every_bound if optimizer.adaptive is None else "adaptive"
            basis["optimizer", "max_grad_norm"] = bound
        return basis

    def refuse_changes(self) -> None:
        """
        Refuses changes, since training began, of what the run's privacy depends on.
        """
        if self._began is None or self.hooks is None:
            return
        now = {**self._basis(), **self._own_basis()}
        for (owner, name), before in self._began.items():
            if now[owner, name] != before:
                raise Refused(
                    f"{owner}.{name} was {before!r} when training began, and is "
                    f"{now[owner, name]!r} now: noise, draws and what is accounted for "
                    "rest on the first.",
                    parameter=name,
                    remedy="Leave it as it is in a run, and begin another one with "
                    "what it is to be.",
                )

    def choose_strategy(
        self,
        noise: Union[str, Strategy],
        sampling: Sampling,
        loader: DataLoader,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        done: int,
    ) -> Tuple[Union[str, Strategy], Sampling]:
        """
        Returns the noise of a run, and how its batches are drawn.

        Args:
            noise: "independent", "banded" or a strategy of correlated noise
            sampling: as it is for independent noise
            loader: of the records
            optimizer: tells its momentum
            config, done: see :meth:`choose_noise`

        Raises:
            Refused: for more steps than the noise is planned for
        """
        if noise == INDEPENDENT:
            return noise, sampling
        if isinstance(noise, Strategy):
            strategy = noise
        elif self.saved is not None:
            strategy = Banded(**self.saved["strategy"])
        else:
            assert self.target_epsilon is not None  # check_noise has asked for it
            records, steps = count_records(loader.dataset), config["max_steps"] - done
            strategy = banded(
                sampling,
                self.engine.accountant,
                records,
                optimizer,
                epsilon=self.target_epsilon,
                delta=self.target_delta,
                epochs=(steps - 0.5) / sampling.steps_per_epoch(records),
            )
        check_planned(strategy, config["max_steps"])
        return strategy, cyclic(sampling, strategy, loader)

    def choose_noise(
        self,
        sampling: Sampling,
        records: int,
        config: Mapping[str, Any],
        done: int,
        noise: Union[str, Strategy] = INDEPENDENT,
    ) -> float:
        """
        Returns the noise multiplier of a run with these settings.

        Args:
            config: as of :meth:`state_dict`; "max_steps" is in it with a target, and
                with correlated noise
            done: how many of these steps the checkpoint has that the run goes on from
            noise: "independent", or the strategy of correlated noise
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        if self.saved is not None and not self.plans(self.saved, config, done):
            return self.saved["noise_multiplier"]
        assert self.target_epsilon is not None  # one of the two was given
        sampling.check(records)

        def record(trial: IAccountant, noise_multiplier: float) -> None:
            steps = config["max_steps"] - done
            if sampling.allocates:  # an epoch that is under way counts once more
                assert sampling.steps is not None
                steps += done % sampling.steps
            strategy = noise if isinstance(noise, Strategy) else None
            sampling.account(trial, records, noise_multiplier, steps, strategy)

        spent, epsilon = self._spent(self.saved), self.target_epsilon
        return noise_left(spent, epsilon, self.target_delta, record=record)

    def plans(
        self, saved: Mapping[str, Any], config: Mapping[str, Any], done: int
    ) -> bool:
        """Returns True if a run that goes on chooses its noise anew."""
        if self.target_epsilon is None or config["max_steps"] <= done:
            return False
        return any(saved["config"].get(name) != config[name] for name in _PLAN)

    def _spent(self, saved: Optional[Mapping[str, Any]]) -> IAccountant:
        """Returns an accountant with the steps before the run."""
        if saved is None:
            return self.engine.accountant
        state = copy.deepcopy(saved[ACCOUNTANT])
        accountant = create_accountant(state["mechanism"])
        accountant.load_state_dict(state)
        return accountant

    def refuse_spent(self, saved: Optional[Mapping[str, Any]], setting: str) -> None:
        """Refuses a run for which nothing is left; ``setting`` says how long it is."""
        accountant, epsilon = self._spent(saved), self.target_epsilon
        if epsilon is None or not len(accountant):
            return
        spent = self.get_epsilon()
        if saved is not None:
            spent = float(accountant.get_epsilon(self.target_delta))
        # The noise was chosen to leave less than this.
        if spent > epsilon - 0.01:
            raise Refused(
                f"target_epsilon={epsilon} is spent: the steps so far have spent "
                f"{spent:.2f}.",
                parameter="target_epsilon",
                remedy=f"For more {setting} give a larger one, such as target_epsilon="
                f"{math.ceil(1.5 * spent)}: it is for all steps on these records, from "
                "the first on.",
            )

    def state_dict(self, config: Dict[str, Any]) -> Dict[str, Any]:
        """Returns what a run with these settings goes on from."""
        noise = self.optimizer.correlated
        return {
            **spent_by(self.engine),
            "config": config,
            "noise_multiplier": self.optimizer.noise_multiplier,
            "strategy": None if noise is None else asdict(noise.strategy),
            "bounds": self.optimizer.every_bound,
            "noise": None if self.noise is None else self.noise.get_state(),
            "seed": self.seed,
            "draw": self.draw,
        }

    def refuse_others(
        self, saved: Mapping[str, Any], config: Dict[str, Any], path: Any, name: str
    ) -> None:
        """
        Refuses the state of a run with other settings, given as ``name``. A target and
        steps may be others if the noise is independent.
        """
        kind = saved[ACCOUNTANT]["mechanism"]
        # Older ones don't say these.
        defaults = {"secure_mode": False, "sampling": "poisson", "noise": INDEPENDENT}
        before = {**defaults, "accountant": kind, **saved["config"]}
        own = self.engine.accountant.mechanism()
        config = {**defaults, "accountant": own, **config}
        keys = before.keys() | config.keys()
        if config["noise"] == INDEPENDENT:
            keys = keys - {*_PLAN}
        others = sorted(key for key in keys if before.get(key) != config.get(key))
        if others:
            changed = "; ".join(
                f"{key}: {before.get(key)!r} there, {config.get(key)!r} here"
                for key in others
            )
            reason = _PLANNED if {*others} <= {*_PLAN} else ""
            raise Refused(
                f"{path} belongs to another run; these must be the same: {changed}."
                f"{reason}",
                parameter=name,
                remedy="Give the settings that it was written with, or train anew "
                "from its weights.",
            )

    def repeat_noise(self) -> None:
        """Draws the noise that the run would have had if it had not been stopped."""
        if self.noise is not None and self.saved is not None:
            self.noise.set_state(self.saved["noise"].cpu())

    def end(self) -> None:
        """Leaves an ordinary model. Idempotent."""
        hooks, self.hooks, self.saved, self.sampling = self.hooks, None, None, None
        self._basis, self._began = dict, None
        if hooks is None:
            return
        hooks.cleanup()
        for p in hooks._module.parameters():
            p.grad = None
            if hasattr(p, "summed_grad"):
                del p.summed_grad
