"""One KFP component a folder; each maps artifact paths to the arguments of a library function."""
