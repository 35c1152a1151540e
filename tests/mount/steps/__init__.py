"""Steps of the differential suite. Importing the package registers every one of them."""

from importlib import import_module

GROUPS = (
    "opening",
    "renaming",
    "linking",
    "directories",
    "modes",
    "permissions",
    "sizes",
    "times",
    "attributes",
    "naming",
    "holding",
    "nodes",
)

for _group in GROUPS:
    import_module(f"{__name__}.{_group}")
