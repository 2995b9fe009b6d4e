"""The whole stack, every part real; a package, so that the stack ends with its tests."""
