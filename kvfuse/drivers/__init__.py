"""Adapters between a FUSE protocol and the pool; they know no policy."""
