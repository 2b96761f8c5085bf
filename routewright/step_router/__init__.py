"""The step router: does the small model take this step of an episode, or the big one (arXiv 2605.16604)."""
