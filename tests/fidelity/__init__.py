"""Requests down both lanes of a real stack, compared; a package, so that its stack ends with its tests."""
