"""The pure core: what can be decided without asking a disk, a clock or the kernel."""
