"""The random generator that all keys are for."""

GENERATOR = "threefry2x32"
"""Of training and of samples, whatever jax's default is: another may draw differently for a row
alone and in a batch, and its keys do not fit in the checkpoints of runs that have begun."""
