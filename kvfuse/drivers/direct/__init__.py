"""The direct driver: the kernel's FUSE protocol spoken on /dev/fuse, without libfuse."""
