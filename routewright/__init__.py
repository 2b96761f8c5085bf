"""Train small language models to route from outcomes, and keep them in service."""

__version__ = "0.1.0"
