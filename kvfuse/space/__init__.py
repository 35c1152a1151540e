"""Who may use the room of the disks, and who may go from them."""
