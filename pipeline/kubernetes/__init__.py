"""Runs on Kubernetes: the objects of a job from its configuration, and handing them over."""
