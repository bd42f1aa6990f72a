"""The adapter: a model that runs one sample at a time, and is called as before."""
