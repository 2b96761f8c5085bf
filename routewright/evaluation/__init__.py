"""Ranking and calibration metrics, bootstrap intervals, summaries and reports."""
