"""What KV connectors do to the filesystem, step by step. Importing registers every sequence."""

from importlib import import_module

MODULES = ("llmd", "vllm", "lmcache", "mooncake", "sglang", "pvc_evictor")

for _module in MODULES:
    import_module(f"{__name__}.{_module}")
