import os

# Before NumPy is imported: as many threads as cores in each of as many processes wait
# for each other, and so would those of the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
