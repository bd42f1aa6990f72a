"""A model run one sample at a time, all at once."""
