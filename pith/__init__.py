"""pith: verifiable skills around a Mixture-of-Experts trainer."""

__version__ = "0.1.0"
