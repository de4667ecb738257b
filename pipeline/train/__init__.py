"""The training stage: schedule, step, loop, checkpoints and the Ray Train driver."""
