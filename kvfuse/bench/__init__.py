"""The workload of KV caches, and what measures it on several directories in turn."""
