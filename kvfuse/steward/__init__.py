"""The process that reads disks beside the server: it looks, the server decides."""
