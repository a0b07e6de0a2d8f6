"""Versions: what differs between releases of the libraries, one file per library."""
