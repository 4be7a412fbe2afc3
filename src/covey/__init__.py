"""Covey: reinforcement learning for language models with group-relative policy optimisation."""

__version__ = "0.1.0"
