"""The paper's law: its L2, with constants fitted to the results that it published.

"Scaling laws for differentially private language models" publishes neither its
measurements nor the constants of its laws, but their exponents (appendix E) and the
best configuration of 16 budgets with its loss (table 2). ``benchmarks/planner_laws.py``
holds these rows, fits the constants to them and measures the errors.

Of the exponents, a is the paper's, b is fitted, and g and a2 are such that more epsilon
never plans a smaller model at equal compute (section 4.1). Examples are counted in
physical batches, 1,024 a step, as the losses were measured so.
"""

import math

from opacus_ext.planner.laws import private_sigmoid

TOKENS, PHYSICAL_BATCH = 512, 1024
SIZES = 4.5e6, 7.78e8  # that were trained
STEPS = 1e3, 8.2e6  # of the paper's plans; runs ended at MEASURED_STEPS
MEASURED_STEPS = 128_000.0
MOST_LOSS = math.log(30_522)  # of a uniform prediction; the formula goes beyond
RATIOS = 2.0**-20.25, 2.0**-8.5  # of the table's rows
ROWS, ERRORS = 16, (0.029, 0.063)  # of the table's losses: mean and largest

PAPER = private_sigmoid.of(
    E=0.3597, A=4345.7, B=189.11, C=2.309e-05, a=0.47, b=0.3271, g=2.0, a2=-0.78
)
