"""The `anchorleg` command: the stack on one machine, each process by itself, the model, the measures."""
