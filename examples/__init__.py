"""Training programs to read, run and copy from; they are not part of the package.

    python -m examples.train --help       # DPFormer on sequences of items: make train
    python -m examples.finetune --help    # a Switch model on SST-2 or MNLI

They run from the root of the repository, with the package installed.
"""
