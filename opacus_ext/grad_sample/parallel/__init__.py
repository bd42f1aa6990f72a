"""Experts sharded over processes: tokens travel to their expert and back.

Every process holds all of the model but of the experts only its share, and reads its
own samples. A token travels together with the number of its sample, in one all-to-all,
so the process that holds the expert knows the per-sample gradients of all samples
there; what a sample's gradients amount to over all processes is found by one
all-reduce of ``[B]`` squared norms (optimizers/clipping.py).

All processes must take part in every exchange, forward and backward, a process whose
batch is empty too. A forward pass is a row of exchanges of counts
(:meth:`ExpertGroup.exchange_counts`): one at its start, one for each layer of experts,
one at its end; and what a process refuses in between it tells the others at the next,
wherever they are.

Source: DP mixture of experts, "Per-sample gradients with expert parallelism" and
appendix.
"""
