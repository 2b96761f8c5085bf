"""Agents, their search backends, pool files, judges and query logs."""
