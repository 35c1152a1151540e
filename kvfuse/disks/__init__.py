"""The disks of a pool: which they are, and safe access to what lies on them."""
