"""The catalog: names and records of the pool in LMDB."""
