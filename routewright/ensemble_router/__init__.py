"""The ensemble router: which of N co-trained agents answer, and how their answers become one (arXiv 2609.18779)."""
