"""Errors that a person caused and can mend; the command line turns them into one sentence and an exit code."""

from __future__ import annotations


class BadInput(Exception):
    """A file, request, config or environment value is wrong (exit code 2, HTTP 400).

    The message is one sentence naming file, line and field where there is one, and what was expected.
    """


class StageFailed(Exception):
    """A pipeline stage ended in failure for a reason other than its input (exit code 1)."""
