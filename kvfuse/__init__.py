"""kvfuse: one FUSE mount over many disks for the KV caches of LLM serving engines."""

__version__ = "0.1.0"
