"""Experts sharded over processes: tokens travel to their expert and back.

Every process holds its share of the experts and all other parts of the model, and
reads its own samples. A token travels with the number of its sample, so the process
that holds the expert knows the per-sample gradients of all samples there. One
all-reduce of ``[B]`` squared norms gives each sample's norm over all processes
(model.py).

All processes take part in every exchange, forward and backward, also those whose batch
is empty. They meet at the start of a forward pass, at each layer of experts and at the
end (:meth:`ExpertGroup.meet`). A process that refuses something in between says so
where they meet next.

Source: DP mixture of experts, "Per-sample gradients with expert parallelism" and
appendix.
"""
