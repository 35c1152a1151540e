"""What the operating system gives: calls Python has not, mounts, signals, logs."""
