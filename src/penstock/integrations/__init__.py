"""Bridges to other libraries, over the public API only. Nothing here is imported by `import penstock`."""
