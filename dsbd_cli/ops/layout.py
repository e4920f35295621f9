"""The layout of what kernels of an iteration write, on every device."""

FIELDS = ("token", "parent", "root", "path", "stop_state", "drafter_id", "slot", "position")  # numbers of a node
FLAGS = ("valid", "ends", "sampled")  # of a node
STREAMS = 8  # of noise
FIRST, COLUMNS = 7, 9  # counters of a row before those of its layers, and of each layer
