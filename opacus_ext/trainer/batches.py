"""Trainer on logical batches: what a step draws, in parts that fit into memory."""

from __future__ import annotations

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from opacus_ext.data.draws import Draws
from opacus_ext.data.logical import LogicalBatches, logical_loader
from opacus_ext.data.sampling import Poisson, TruncatedPoisson
from opacus_ext.trainer.arguments import PrivacyArguments
from opacus_ext.trainer.records import RecordTrainer


class BatchTrainer(RecordTrainer):
    """
    Trainer whose training loader draws logical batches by Poisson sampling, or
    shuffles.

    Attributes:
        privacy: says which
        _seed: of all draws
        _draw: number of the next draw
        _draws: the record numbers of logical batches, one after the other
    """

    privacy: PrivacyArguments
    _seed: int
    _draw: int
    _draws: Sampler

    @property
    def logical_batch_size(self) -> int:
        """What a step has of records, in expectation; at most all of them are."""
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        """Records over the logical batch size, rounded up, as Trainer counts them."""
        return -(-len(self.train_dataset) // self.logical_batch_size)

    @property
    def sampling(self) -> Poisson:
        """Each record with the probability B / N, whatever the two are."""
        size = min(self.logical_batch_size, len(self.train_dataset))
        drawn = {"expected_batch_size": size, "steps": self.steps_per_epoch}
        if self.privacy.max_batch_size is None:
            return Poisson(**drawn)
        return TruncatedPoisson(**drawn, max_batch_size=self.privacy.max_batch_size)

    def get_train_dataloader(self) -> DataLoader:
        """
        The training loader. ``gradient_accumulation_steps`` of its items make a logical
        batch; each is a list of :class:`~opacus_ext.data.logical.Part`.
        """
        stock = super().get_train_dataloader()
        generator = torch.Generator()
        self._draws = self._sampler(generator)
        batches = LogicalBatches(
            self._draws,
            generator,
            self.args.per_device_train_batch_size,
            items=self.args.gradient_accumulation_steps,
            seed=self._seed,
            first=self._draw,
        )
        return logical_loader(
            stock.dataset,
            batches,
            stock.collate_fn,
            multiprocessing_context=stock.multiprocessing_context,
            num_workers=stock.num_workers,
            pin_memory=stock.pin_memory,
            persistent_workers=stock.persistent_workers,
            prefetch_factor=stock.prefetch_factor,
        )

    def _sampler(self, generator: torch.Generator) -> Sampler:
        size = len(self.train_dataset)
        if not self.privacy.poisson_sampling:
            shuffled = RandomSampler(range(size), generator=generator)
            return BatchSampler(shuffled, self.logical_batch_size, drop_last=False)
        return Draws(self.sampling, size, generator)
