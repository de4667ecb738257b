"""The pipeline: command line and stages, from a corpus to an evaluated checkpoint."""
