"""Reading disks whose contents the catalog does not know for sure."""
