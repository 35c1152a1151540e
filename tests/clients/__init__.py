"""Real connectors, unmodified, run against a directory. ``scripts/test-clients`` installs them.

The programs here need only the client they run and the standard library.
"""
