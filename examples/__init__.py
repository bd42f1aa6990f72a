"""Training programs to read, run and copy from; they are not part of the package.

    python -m examples.finetune --help    # a Switch model on SST-2 or MNLI
    python -m examples.synthetic_text --help    # new texts in place of private ones

They run from the root of a clone, with the package installed; elsewhere Python finds a
package of this name that is Opacus's. Recommenders need none: opacus-ext recommend.
"""
