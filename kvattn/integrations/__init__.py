"""Adapters for other libraries; each imports its library, so none is imported by default."""
