"""The pipelines, how they are compiled, and how they run on one machine."""
