"""What clients can do: the verbs of the pool on ids and names."""
