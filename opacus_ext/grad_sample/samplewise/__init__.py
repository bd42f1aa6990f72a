"""A model run one sample at a time, all at once.

The walk from an activation to a parameter's gradient:

================== ==================================================================
engine             stands in the place of the model's ``forward``
first_step, kinds  what is known of the inputs; the first of a kind is compared
parts              which samples run together; at_once, scan: the two ways
run                the mode that sees each op; ops, branches: who handles it
recording, uses    what is made of parameters, and which ops used it
batch, functorch   steps out of vmap and back
native             calls on whole batches; experts, recurrent, bags, functions
gather             from uses to the per-sample gradients of parameters (factors)
================== ==================================================================

Beside it: states (what a forward leaves on modules), hooks, checkpoint, packed, sandbox
(a forward without traces), compare (samples beside the batch), compiled (torch.compile)
and whole_batch (ops that compiled programs run beside vmap).
"""
