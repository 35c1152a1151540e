"""The control plane: one service, several adapters; never in the data path."""
