"""Forward and backward pass of all samples as one program, where the user compiles.

``torch.compile`` of a private model is taken over: Dynamo reads the model's code as one
sample sees it, a batch of one, and guards it as ever. What it has read runs under vmap
(run.py) while the compiler looks on, and so do norms, clipping factors and clipped
sums: to autograd they are the gradients of the parameters (:class:`trace.Collect`). So
the compiler that the user has chosen gets the whole step, but for the criterion between
the passes and the noise, for any batch size.
"""
