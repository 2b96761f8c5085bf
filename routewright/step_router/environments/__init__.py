"""Where episodes happen: text games, code with tests, shell tasks."""
