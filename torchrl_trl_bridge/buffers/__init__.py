"""Data: replay buffers as datasets."""
