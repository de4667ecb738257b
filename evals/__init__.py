"""What a checkpoint is worth: held-out loss by domain, baselines, and harness tasks."""
