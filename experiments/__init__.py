"""The experiments of the documents that this library comes from, each in a folder of its own; see `framework`."""
