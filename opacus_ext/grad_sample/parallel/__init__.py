"""Experts sharded over processes: tokens travel to their expert and back.

Every process holds all of the model but of the experts only its share, and reads its
own samples. A token travels with the number of its sample, so the process that holds
the expert knows the per-sample gradients of all samples there; what a sample's
gradients amount to over all processes is found by one all-reduce of ``[B]`` squared
norms (model.py).

All processes take part in every exchange, forward and backward, a process whose batch
is empty too. They meet at the start of a forward pass, at each layer of experts and at
the end (:meth:`ExpertGroup.meet`); what a process refuses in between it tells the
others where they meet next.

Source: DP mixture of experts, "Per-sample gradients with expert parallelism" and
appendix.
"""
