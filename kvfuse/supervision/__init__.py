"""What outlives the server of a mount and starts the next one."""
