"""Making room: from the order of last use to the removal of files."""
