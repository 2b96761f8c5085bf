"""The search router: which agents answer this query (arXiv 2608.00030)."""
